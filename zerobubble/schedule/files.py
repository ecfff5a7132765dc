"""Schedules in files: JSON of our own, or torch.distributed.pipelining's CSV."""

from __future__ import annotations

from pathlib import Path

from zerobubble.errors import UserError
from zerobubble.schedule.formats import from_json
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.torch_csv import from_csv
from zerobubble.schedule.verify import verify

ENDINGS = (".json", ".csv")


def load_schedule(path: str) -> Schedule:
    """The schedule in `path`, verified.

    Raises UserError, naming the file and what is wrong in it: the row and op where one is.
    """
    file = Path(path)
    if file.suffix not in ENDINGS:
        raise UserError(f"{path} is neither .json nor .csv; name a schedule file by its ending")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"schedule file {path} cannot be read: {reason}") from None
    try:
        schedule = from_json(text) if file.suffix == ".json" else from_csv(text, file.stem)
        verify(schedule)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return schedule
