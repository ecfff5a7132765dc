"""Train a GPT or Llama through a pipelined schedule; see --help and README.md."""

from __future__ import annotations

import os
import sys

from zerobubble.errors import UserError
from zerobubble.training.arguments import parse
from zerobubble.training.launch import rank_and_world, refuse


def main() -> None:
    """Parse, check, join the processes, train."""
    rank, world = rank_and_world()
    try:
        arguments = parse(sys.argv[1:])
        arguments.check_world(world)
    except UserError as error:
        refuse("pretrain_gpt.py", error)

    import torch  # only now: a wrong flag is answered at once

    from zerobubble.training.launch import join, leave
    from zerobubble.training.loop import Training

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # bits depend on it; torchrun sets the variable itself
    try:
        join(arguments.pipeline.backend)
        Training(arguments, rank).run()
    except UserError as error:
        refuse("pretrain_gpt.py", error)
    leave()


if __name__ == "__main__":
    main()
