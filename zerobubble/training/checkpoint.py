"""Plain checkpoints: one file per rank, keyed by parameter name, so any layout can load them.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/rank_0.pt ...

A checkpoint is written beside its place and renamed when whole; the pointer moves last.
Loading executes nothing from the files (torch's weights-only reader).
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerobubble.errors import UserError

_LATEST = "latest_checkpointed_iteration.txt"


def prepare_folder(folder: str) -> None:
    """Make sure that checkpoints can be written to `folder`. Raises UserError if not."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder) / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--save {folder} cannot be written ({error.strerror}); name a folder that can"
        ) from error


def save(
    folder: str,
    iteration: int,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Mapping[str, Any],
    progress: Mapping[str, Any],
    model: Mapping[str, Any],
) -> Path:
    """Write this rank's part of iteration's checkpoint; returns where it is.

    Collective. `optimizer` is keyed by parameter name; `progress` and `model`, what tells
    this model from others, are the same on every rank.
    Raises UserError, with what was there before untouched, where the disk refuses.
    """
    place = Path(folder) / f"iter_{iteration:07d}"
    partial = place.with_name(place.name + ".partial")
    rank = dist.get_rank()
    failure = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "parameters": {name: p.detach() for name, p in parameters.items()},
                "optimizer": dict(optimizer),
                "progress": dict(progress),
                "model": dict(model),
                "ranks": dist.get_world_size(),
            },
            partial / f"rank_{rank}.pt",
        )
    except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in the latter
        failure = f"rank {rank} could not write its part of {place}: {error}"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = next((f for f in failures if f is not None), None)
    if rank == 0:
        if first is not None:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
            pointer = Path(folder) / _LATEST
            fresh = pointer.with_suffix(".partial")
            fresh.write_text(f"{iteration}\n")
            fresh.replace(pointer)
    dist.barrier()
    if first is not None:
        raise UserError(first)
    return place


def latest(folder: str) -> Path | None:
    """Where the latest whole checkpoint of `folder` is; None where there is none yet.

    Raises UserError where the pointer is garbled or names what is not there.
    """
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UserError(f"--load {folder} is a file; name the folder that --save wrote to")
    pointer = Path(folder) / _LATEST
    if not pointer.exists():
        return None
    try:
        text = pointer.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{pointer} cannot be read ({error}); correct or remove it") from error
    if not text.isdigit():
        raise UserError(f"{pointer} holds {text!r}, not an iteration; correct or remove it")
    place = Path(folder) / f"iter_{int(text):07d}"
    if not place.is_dir():
        raise UserError(f"{pointer} names iteration {text}, but {place} is not there")
    return place


def load(
    place: Path, parameters: Mapping[str, nn.Parameter], model: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill this rank's parameters from the checkpoint; returns its optimizer and progress.

    Reads the parts of all ranks that wrote it, and takes what it needs by name. Raises
    UserError, with the parameters untouched, where a part is missing or unreadable, the
    model is another, or a parameter is missing or of another shape.
    """
    parts = [_read(place / "rank_0.pt")]
    for name, value in model.items():
        saved = parts[0]["model"].get(name)
        if saved != value:
            raise UserError(
                f"{place} is of another model: {name} is {saved} there and {value} here; use the "
                "flags of the run that saved it"
            )
    parts += [_read(place / f"rank_{rank}.pt") for rank in range(1, parts[0]["ranks"])]
    found = {name: value for part in parts for name, value in part["parameters"].items()}
    state = {name: value for part in parts for name, value in part["optimizer"].items()}
    for name, parameter in parameters.items():
        if name not in found or name not in state:
            raise UserError(f"{place} has no parameter {name}; it is of another model")
        if found[name].shape != parameter.shape:
            raise UserError(
                f"{name} is {tuple(parameter.shape)} here and {tuple(found[name].shape)} in "
                f"{place}; use the sizes and the vocabulary of the run that saved it"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found[name])
    return {name: state[name] for name in parameters}, parts[0]["progress"]


def _read(path: Path) -> dict[str, Any]:
    try:
        part: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for key in ("parameters", "optimizer", "progress", "model", "ranks"):
            part[key]
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is missing; put it back, or name a whole checkpoint in {_LATEST}"
        ) from error
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {reason}; put it back, or name "
            f"a whole checkpoint in {_LATEST}"
        ) from error
    return part
