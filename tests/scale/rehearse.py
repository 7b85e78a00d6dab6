"""A VAPO run at the process layout of a large job, of real ranks and tiny widths, one of which is killed:
python -m tests.scale.rehearse 32

Value pretraining, two steps with a transfer and a checkpoint each; in the second a rank is killed, and the
same command continues. The final weights are those of one rank alone, to rounding; up to 32 ranks also those
of an undisturbed run at the same layout, bit for bit. Prints the row of docs/scale.md, and leaves all figures
in runs/scale/RANKS/figures.json.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from megarl.config import dump_config
from megarl.config.schema import Config
from megarl.parallel.launch import count_local_ranks
from megarl.schedule.watchdog import read_beat
from tests.scale.idle import WAITED
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
LAYOUTS = {1: (1, 1, 1), 8: (2, 2, 2), 32: (4, 4, 2), 64: (8, 4, 2), 128: (8, 4, 4)}  # tp, pp, dp
BITWISE = 32  # ranks up to which the undisturbed run is done too
LIMIT = 3600.0  # seconds for one run, on a machine that has much else to do
EACH = 15.0  # seconds between two looks at the memory: the kernel walks every page of every rank
KILLED = 137
ROUNDING = 1e-3  # of the way that the weights have gone


def config_of(folder: Path, name: str, ranks: int) -> Config:
    """The same run at any layout. 128 responses a rollout: one for each engine of 128 ranks."""
    tp, pp, dp = LAYOUTS[ranks]
    return Config.model_validate(
        {
            "recipe": "vapo",
            "run_dir": folder / name,
            "steps": 2,
            "model": {"path": folder / "model", "dtype": "fp32", "layers": "portable"},
            "parallel": {"tp": tp, "pp": pp, "dp": dp, "device": "cpu", "timeout": 600},
            "data": {"train": [folder / "train.jsonl"], "template": "raw", "max_prompt_tokens": 16},
            "rollout": {"prompts": 16, "group_size": 8, "max_response_tokens": 8},
            "reward": {"verifier": "tests.schedule.verifiers:by_checksum", "overlong": {"buffer": 4}},
            "algorithm": {"advantage": "gae", "alpha": 0.5, "nll_weight": 0.1, "clip_high": 0.28},
            "actor": {"lr": 1e-3},
            "critic": {"lr": 2e-3},
            "update": {"mini_batch": 64, "tokens_per_micro_batch": 256},
            "value_pretraining": {"steps": 1},
            "checkpoint": {"every": 1, "timeout": 480},
            "log": {"terminal": "plain", "report": False},
        }
    )


class Job:
    """One `megarl train` with its figures: phases by the clock, CPU seconds, the largest memory of all its
    processes together."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.world = config, count_local_ranks(config.parallel)
        path = config.run_dir.parent / f"{config.run_dir.name}.yaml"
        path.write_text(dump_config(config))
        self.counts = config.run_dir.parent / name
        self.counts.mkdir()
        for file in (config.run_dir / "heartbeat").glob("rank-*.json"):
            file.unlink()  # of the run before
        command = [sys.executable, "-m", "tests.scale.counted", str(self.counts), "train", str(path)]
        self.began, self.clock = time.monotonic(), time.time()
        self.log = self.counts / "output.txt"
        with open(self.log, "wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.memory, self._ended = 0, threading.Event()
        # Beside the wait: with a hundred ranks that want the same two cores, one look takes a minute.
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def beat(self, rank: int) -> dict[str, Any]:
        return read_beat(self.config.run_dir / "heartbeat", rank) or {}

    def _watch_memory(self) -> None:
        while not self._ended.wait(EACH):
            with suppress(psutil.NoSuchProcess):
                family = [
                    psutil.Process(self.process.pid),
                    *psutil.Process(self.process.pid).children(recursive=True),
                ]
                self.memory = max(self.memory, sum(map(_proportional, family)))

    def _phases(self) -> list[tuple[str, float]]:
        """(phase of rank 0, seconds from the command to its begin)."""
        found = [line.split(" ", 1) for line in (self.counts / "phases.txt").read_text().splitlines()]
        return [(name, round(float(began) - self.clock, 2)) for began, name in found]

    def run(self, victim: int | None = None) -> dict[str, Any]:
        """To its end, or until `victim` is killed in the second step's actor update; gives the figures."""
        code = 0
        while (status := os.wait4(self.process.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() - self.began > LIMIT:
                self.process.send_signal(signal.SIGTERM)
                raise SystemExit(
                    f"rehearse: {self.config.run_dir} takes longer than {LIMIT:.0f} s: see {self.log}"
                )
            if victim is not None and self._in_second_update(beat := self.beat(victim)):
                os.kill(int(beat["pid"]), signal.SIGKILL)
                victim, code = None, KILLED
            time.sleep(0.05)
        self._ended.set()
        used = status[2]
        self.process.returncode = os.waitstatus_to_exitcode(status[1])
        if self.process.returncode != code:
            raise SystemExit(f"rehearse: exit code {self.process.returncode}, not {code}: see {self.log}")
        seconds = time.monotonic() - self.began
        ranks = [json.loads(path.read_text()) for path in sorted(self.counts.glob("rank-*.json"))]
        return {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "memory_gb": round(self.memory / 1e9, 2),
            "phases": self._phases(),
            "ranks": ranks,
        }

    @staticmethod
    def _in_second_update(beat: dict[str, Any]) -> bool:
        return (beat.get("stage"), beat.get("step"), beat.get("phase")) == ("train", 2, "actor_update")


def _proportional(process: psutil.Process) -> int:
    """Bytes of memory, what is shared by several processes shared out between them."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:")))


def weights(folder: Path) -> torch.Tensor:
    """All of a Hugging Face folder's, one after the other, by name."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def make_folder(folder: Path) -> None:
    """Model and data of all runs: no model smaller than this can be cut into tp 8 x pp 4."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_tiny_model(folder / "model", "qwen3", layers=4, hidden=64, heads=8, kv_heads=8, ffn=64)
    rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rehearse(ranks: int, folder: Path) -> dict[str, Any]:
    """All runs and comparisons; gives the figures. SystemExit where something is not as it must be."""
    make_folder(folder)
    config = config_of(folder, "run", ranks)
    killed = Job(config, "killed").run(victim=ranks // 2 + 1 if ranks > 2 else ranks - 1)
    continued = Job(config, "continued").run()
    figures: dict[str, Any] = {"killed": killed, "continued": continued, "records": _records(config.run_dir)}
    figures["idle"] = idle(ranks, folder / "idle")
    single = config_of(folder, "single", 1)
    Job(single, "alone").run()
    before, big, small = (
        weights(path) for path in (folder / "model", config.run_dir / "hf", single.run_dir / "hf")
    )
    figures["from_one_rank"] = off = float((big - small).norm() / (small - before).norm())
    print(
        f"weights differ from those of one rank by {off:.1e} of the way that they have gone (at most "
        f"{ROUNDING:.0e})",
        flush=True,
    )
    if not off <= ROUNDING:
        raise SystemExit("rehearse: that is more than rounding")
    if ranks <= BITWISE:
        undisturbed = config_of(folder, "undisturbed", ranks)
        Job(undisturbed, "whole").run()
        if not torch.equal(weights(undisturbed.run_dir / "hf"), big):
            raise SystemExit("rehearse: the continued run's weights are not those of the undisturbed one")
        print("weights are those of an undisturbed run, bit for bit", flush=True)
    return figures


def _records(run_dir: Path) -> dict[str, dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {f"{record['stage']} {record['step']}": record for record in map(json.loads, lines)}


def idle(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank counts while it starts and while it waits for responses, see tests/scale/idle.py."""
    folder.mkdir()
    layout = map(str, LAYOUTS[ranks])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.scale.idle", folder, *layout],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=LIMIT,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def row(ranks: int, figures: dict[str, Any]) -> str:
    """Of the table in docs/scale.md."""
    killed, continued = figures["killed"], figures["continued"]

    def until(job: dict[str, Any], phase: str) -> float:
        return next(seconds for name, seconds in job["phases"] if name == phase)

    def each(moment: str, what: str, per: float = 1.0) -> str:
        """Of rank 0, and of the rank in the middle of all others."""
        first, *others = [rank[moment].get(what, 0) / per for rank in figures["idle"]]
        return " / ".join(
            f"{number:,.0f}" if number > 100 else f"{number:.3g}"
            for number in (first, statistics.median(others))
        )

    step, pretraining = figures["records"]["train 1"], figures["records"]["value_pretraining 1"]
    ends = [rank["end"] for rank in continued["ranks"]]
    cells = [
        f"{ranks}",
        "tp{} pp{} dp{}".format(*LAYOUTS[ranks]),
        f"{until(killed, 'rollout'):.0f}",
        f"{max(rank['start_seconds'] for rank in continued['ranks']):.0f}",
        f"{until(continued, 'rollout'):.0f}",
        f"{ends[0].get('sockets', 0)} / {statistics.median(end.get('sockets', 0) for end in ends[1:]):.0f}",
        each("waiting", "messages", WAITED / 10),
        each("waiting", "bytes", WAITED / 10),
        f"{sum(end.get('messages', 0) for end in ends) / 2e3:.0f}",
        f"{pretraining['time/step']:.0f}",
        *(
            f"{step[f'time/{phase}']:.1f}"
            for phase in ("rollout", "old_logprobs", "critic_update", "actor_update", "weight_transfer")
        ),
        f"{step['time/step']:.0f}",
        f"{killed['seconds'] + continued['seconds']:.0f}",
        f"{killed['cpu_seconds'] + continued['cpu_seconds']:.0f}",
        f"{max(killed['memory_gb'], continued['memory_gb']):.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    count = int(sys.argv[1])
    if count not in LAYOUTS:
        raise SystemExit(f"rehearse: {count} ranks: choose one of {', '.join(map(str, LAYOUTS))}")
    place = ROOT / "runs" / "scale" / str(count)
    found = rehearse(count, place)
    (place / "figures.json").write_text(json.dumps(found, indent=1))
    print(row(count, found))
