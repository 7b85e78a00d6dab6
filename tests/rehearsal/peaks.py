"""Print the simulated peak GPU memory of one rank of a job, phase by phase, next to `megarl plan`.

python -m tests.rehearsal.peaks configs/vapo_32b.yaml [configs/...] [--stage N] [--layers N]
                                [--explain PHASE] [key=value ...]

Each configuration is measured on the first, second and last pipeline stage, each in a separate process
(lonely.py). A process takes a minute or two of CPU time and less than 2 GiB. Models are those that megarl
knows by name, without weights. --layers replaces the number of layers. --explain prints the lines of code
whose tensors were alive at a phase's peak. Transformer Engine's layers need its Python half:
`make test-te` installs it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import load_config
from megarl.config.schema import Config
from megarl.plan.inputs import make_plan_inputs
from megarl.plan.sizes import GIB
from megarl.weights.known_models import planning_config

ROOT = Path(__file__).parents[2]
LIMIT = 3000.0  # seconds for one rank
Rows = list[dict[str, Any]]


def sizes(config: Config, layers: int | None) -> dict[str, Any]:
    """Return the model's sizes, with another number of layers unless `layers` is None."""
    known = dict(planning_config(config.model.path)[1])
    return known if layers is None else {**known, "num_hidden_layers": layers}


def stages_of(config: Path, overrides: Sequence[str]) -> list[int]:
    """Return the first, second and last pipeline stage."""
    loaded = load_config(config, list(overrides))
    pp = make_plan_inputs(loaded, sizes(loaded, None)).layout.pp
    return sorted({0, min(1, pp - 1), pp - 1})


def measured(
    config: Path, overrides: Sequence[str], stage: int, *, updates: int = 1, layers: int | None = None
) -> Rows:
    """Run lonely.py:measure for one rank in a fresh process, and return its rows."""
    order = {
        "config": str(config),
        "overrides": list(overrides),
        "stage": stage,
        "updates": updates,
        "layers": layers,
    }
    # Omit the kernels that compute on a CPU (tests/te/compiled), which Python would import at startup.
    path = [folder for folder in sys.path if Path(folder).name != "compiled"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.peaks", "--order"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *path])},
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{config}, stage {stage}: {done.stderr[-3000:]}")
    rows: Rows = json.loads(done.stdout)
    return rows


def carry_out(order: dict[str, Any]) -> Rows:
    """Carry out an order of `measured` in this process."""
    config = load_config(Path(order["config"]), order["overrides"])
    if config.model.layers != "portable":
        from tests.rehearsal import te_shapes

        te_shapes.install()  # before Megatron is imported
    from tests.rehearsal.lonely import complete, measure

    return measure(config, complete(sizes(config, order["layers"])), order["stage"], order["updates"])


def table(rows: Rows) -> str:
    """Format rows as Markdown, in GiB; a row without planned bytes has no counterpart in the plan."""
    lines = ["| phase | stage | seen, GiB | planned, GiB | planned / seen |", "|---|---|---|---|---|"]
    for row in rows:
        seen, planned = row["measured"] / GIB, row["planned"] / GIB
        beside = f"{planned:.2f} | {planned / seen:.2f}" if planned and seen else "- | -"
        lines.append(f"| {row['phase']} | {row['stage']} | {seen:.2f} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal.peaks", description=__doc__)
    parser.add_argument("arguments", nargs="*", metavar="CONFIG|key=value")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--updates", type=int, default=1, help="of each model (default 1)")
    parser.add_argument("--explain", metavar="PHASE")
    parser.add_argument("--order", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.order:
        out = os.dup(1)
        os.dup2(2, 1)  # libraries print to stdout, which is for the JSON
        rows = carry_out(json.loads(sys.stdin.read()))
        with os.fdopen(out, "w") as pipe:
            json.dump(rows, pipe)
        return
    overrides = [argument for argument in arguments.arguments if "=" in argument]
    for config in (Path(argument) for argument in arguments.arguments if "=" not in argument):
        print(f"\n{config} {' '.join(overrides)}\n", flush=True)
        stages = [arguments.stage] if arguments.stage is not None else stages_of(config, overrides)
        for stage in stages:
            rows = measured(config, overrides, stage, updates=arguments.updates, layers=arguments.layers)
            print(table(rows), flush=True)
            for row in rows:
                if row["phase"] == arguments.explain:
                    print("planned:", *(f"{v / GIB:.3f} {k}" for k, v in row["parts"].items()), sep="\n  ")
                    print("seen:", *(f"{v / GIB:.3f} {site}" for site, v in row["largest"]), sep="\n  ")


if __name__ == "__main__":
    main()
