"""Schedules in files: JSON of our own, or torch.distributed.pipelining's CSV."""

from __future__ import annotations

from pathlib import Path

from zerobubble.errors import UserError
from zerobubble.schedule.formats import from_json, to_json
from zerobubble.schedule.schedule import Schedule
from zerobubble.schedule.torch_csv import from_csv, to_csv
from zerobubble.schedule.verify import verify

ENDINGS = (".json", ".csv")


def save_schedule(schedule: Schedule, path: str) -> None:
    """Write `schedule` to a .json or .csv file that `load_schedule` reads.

    Raises UserError for another ending, and where the file cannot be written.
    """
    file = Path(path)
    check_ending(file)
    text = to_json(schedule) if file.suffix == ".json" else to_csv(schedule)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"schedule file {path} cannot be written: {error.strerror}") from None


def load_schedule(path: str) -> Schedule:
    """The schedule in `path`, verified.

    Raises UserError, naming the file and what is wrong in it: the row and op where one is.
    """
    file = Path(path)
    check_ending(file)
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


def check_ending(file: str | Path) -> None:
    """Raise UserError unless the file's name ends as that of a schedule."""
    file = Path(file)
    if file.suffix not in ENDINGS:
        raise UserError(f"{file} is neither .json nor .csv; name a schedule file by its ending")
