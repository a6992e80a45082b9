"""Continue a prompt with a run's model.

    k3jax sample runs/quickstart --prompt "def main(" --tokens 200

Every token costs a whole forward pass: decoding with carried states is not built yet.
"""

import argparse
from pathlib import Path

from k3jax.config import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--prompt", default="", help="the text to go on from; nothing is the start of a document"
    )
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token every time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="which checkpoint; the last one if not given")


def run(args: argparse.Namespace) -> None:
    if args.tokens < 1:
        raise ConfigError(f"--tokens={args.tokens}: at least 1")
    if args.temperature < 0:
        raise ConfigError(f"--temperature={args.temperature}: 0 or more")

    from k3jax.data import tokens
    from k3jax.generate import sample
    from k3jax.train import restore

    setup, state, _ = restore.load(args.run, args.step)
    prompt_T = tokens.encode(args.prompt.encode())
    drawn_T = sample(
        setup.cfg.model, state.params, prompt_T, args.tokens, temperature=args.temperature, seed=args.seed
    )
    print(args.prompt + tokens.text(drawn_T))
