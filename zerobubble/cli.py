"""The `zerobubble` command."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from zerobubble.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def zerobubble() -> None:
    """Plan, run and explain pipeline-parallel training."""


@app.command()
def preprocess(
    input: Annotated[
        list[str], typer.Option(help="JSON lines (.json, .jsonl) or plain text, one document each")
    ],
    output_prefix: Annotated[str, typer.Option(help="writes PREFIX.bin and PREFIX.idx")],
    tokenizer_type: Annotated[
        str | None, typer.Option(help="GPT2BPETokenizer, SentencePieceTokenizer or bytes")
    ] = None,
    vocab_file: Annotated[str | None, typer.Option(help="of GPT2BPETokenizer")] = None,
    merge_file: Annotated[str | None, typer.Option(help="of GPT2BPETokenizer")] = None,
    tokenizer_model: Annotated[str | None, typer.Option(help="SentencePiece model")] = None,
    json_key: Annotated[str, typer.Option(help="where a JSON line has its text")] = "text",
    append_eod: Annotated[bool, typer.Option(help="end every document with that token")] = False,
    workers: Annotated[int, typer.Option(min=1, help="processes that tokenize")] = 1,
) -> None:
    """Turn text into Megatron's .bin/.idx, for pretrain_gpt.py --data-path PREFIX."""
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from zerobubble.data.preprocess import preprocess as run
    from zerobubble.data.tokenizer import build_tokenizer

    columns = SpinnerColumn(), TextColumn("documents"), MofNCompleteColumn()
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("documents", total=None)
        written = run(
            input,
            output_prefix,
            partial(build_tokenizer, tokenizer_type, vocab_file, merge_file, tokenizer_model),
            json_key=json_key,
            append_eod=append_eod,
            workers=workers,
            advance=lambda count: progress.advance(task, count),
        )
    print(f"wrote {written.documents} documents, {written.tokens} tokens")
    print(f"train with: --data-path {written.prefix}")


@app.command()
def plan(
    problem: Annotated[
        str | None, typer.Argument(help="a problem as JSON (docs/planning.md); or flags, as below")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="ranks, p")] = None,
    microbatches: Annotated[int | None, typer.Option(help="microbatches, m")] = None,
    times: Annotated[
        str | None, typer.Option(help="F,B,W of a rank's share of the model, in any unit [1,1,1]")
    ] = None,
    link: Annotated[float | None, typer.Option(help="time of a transfer between ranks [0]")] = None,
    memory: Annotated[
        float | None, typer.Option(help="limit in units of 1F1B's peak; none without it")
    ] = None,
    released: Annotated[
        float | None, typer.Option(help="share of an activation that B releases, W the rest [0]")
    ] = None,
    placement: Annotated[str | None, typer.Option(help="linear, v, looped or any [any]")] = None,
    chunks: Annotated[int | None, typer.Option(help="stages per rank, of looped")] = None,
    split_overhead: Annotated[
        float | None, typer.Option(help="share by which a split B and W each cost more [0]")
    ] = None,
    schedule: Annotated[str, typer.Option(help="a family by name, or auto: the best")] = "auto",
    objective: Annotated[
        str, typer.Option(help="makespan (a barrier ends the step) or span (none)")
    ] = "makespan",
    time_limit: Annotated[
        float | None, typer.Option(help="seconds to search; about 1 at 8 ranks, 15 at 32")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="spend the time on proving optimality too (CP-SAT)")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
    picture: Annotated[
        str | None, typer.Option(help="also draw the timeline to a .png, .svg or .pdf file")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="also write the schedule to a .json or .csv to train with")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the search's random numbers")] = 0,
) -> None:
    """Find the best schedule for measured costs under a memory limit, and say how good it is."""
    from zerobubble.plan_report import run

    run(
        problem,
        {
            "ranks": ranks,
            "microbatches": microbatches,
            "times": times,
            "link": link,
            "memory": memory,
            "released": released,
            "placement": placement,
            "chunks": chunks,
            "split_overhead": split_overhead,
        },
        schedule=schedule,
        objective=objective,
        time_limit=time_limit,
        prove=prove,
        as_json=json,
        picture=picture,
        save=save,
        seed=seed,
    )


@app.command()
def show(
    schedule: Annotated[
        str | None,
        typer.Argument(help="a family by name, or a .json or .csv file; without it: all families"),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="ranks, of a family")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="microbatches, of a family")] = 8,
    chunks: Annotated[int | None, typer.Option(min=1, help="stages per rank, of a family")] = None,
    slices: Annotated[
        int | None, typer.Option(min=1, help="slices per sequence, of seq1f1b")
    ] = None,
    interleave_group_size: Annotated[
        int | None,
        typer.Option(min=1, help="microbatches in a row per stage, of interleaved (default: p)"),
    ] = None,
    times: Annotated[
        str, typer.Option(help="F,B,W of a rank's stages together, in any unit")
    ] = "1,1,1",
    link: Annotated[float, typer.Option(min=0, help="time of a transfer between ranks")] = 0.0,
    format: Annotated[str, typer.Option(help="text, nodes, json or csv (torch's)")] = "text",
    picture: Annotated[
        str | None, typer.Option(help="also draw the timeline to a .png, .svg or .pdf file")
    ] = None,
) -> None:
    """Show a schedule: its timeline, its ops, or a file to edit and train with."""
    from zerobubble.show import describe_families, load_or_build, render, simulated

    if schedule is None:
        print(describe_families())
        return
    found = load_or_build(
        schedule, ranks, microbatches, chunks, slices=slices, group=interleave_group_size
    )
    timeline = simulated(found, times, link)
    print(render(found, timeline, format), end="")
    if picture is not None:
        from zerobubble.report.picture import draw

        draw([timeline], picture)
        print(f"picture: {picture}", file=sys.stderr)


def main() -> None:
    """Run the command; a UserError is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"zerobubble: error: {error}", file=sys.stderr)
        sys.exit(2)
