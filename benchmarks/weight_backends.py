"""Compare the weight backends on a real SGLang server, and what a step of training changes.

SmolLM2-135M in bf16 is trained by Adam with float32 master weights on documents of this repository. Then each
backend brings the trained versions into one server on this machine. Client and server are in a separate
network namespace, and `tc` limits its loopback to the rate of a link. Needs root for that.

    .venv-sglang/bin/python benchmarks/weight_backends.py MODEL_DIR            # all of it
    .venv-sglang/bin/python benchmarks/weight_backends.py MODEL_DIR --only changes
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from megarl.config.schema.rollout import WeightsConfig
from megarl.sync import delta

ROOT = Path(__file__).parents[1]
RATES = (1e-6, 1e-5)
STEPS, SENT_STEPS = 4, (1, 2, 3, 4)  # the versions after these steps are sent
ROWS, TOKENS = 2, 256
BACKENDS = ("broadcast", "http", "disk", "delta")
# Link, bytes a second (0: unlimited), learning rate, backends. The first backend is the reference.
CASES: tuple[tuple[str, float, float, tuple[str, ...]], ...] = (
    ("unlimited", 0, 1e-6, BACKENDS),
    ("1 GB/s", 1e9, 1e-6, ("broadcast", "delta")),
    ("1 GB/s", 1e9, 1e-5, ("broadcast", "delta")),
    ("100 MB/s", 1e8, 1e-6, ("broadcast", "delta")),
    ("100 MB/s", 1e8, 1e-5, ("broadcast", "delta")),
)


def read_bytes(tensor: torch.Tensor) -> delta.Bytes:
    array: delta.Bytes = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return array


def measure_changes(folder: Path, out: Path) -> None:
    """Train, print what each step changes, and write the versions that are to be sent."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    print("\nlr      step  elements changed  bytes changed  delta / whole  encode s  apply s  gradient norm")
    for lr in RATES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
        for step in range(1, STEPS + 1):
            before = {name: read_bytes(p).copy() for name, p in model.named_parameters()}
            starts = torch.randint(0, len(ids) - TOKENS, (ROWS,))
            rows = torch.stack([ids[start : start + TOKENS] for start in starts.tolist()])
            model.zero_grad()
            model(rows, labels=rows).loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            report_change(lr, step, before, dict(model.named_parameters()), float(norm))
            if step in SENT_STEPS:
                # clone: tied tensors are one parameter, saved by its first name
                tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
                save_file(tensors, out / f"{lr:g}-{step}.safetensors")


def report_change(
    lr: float, step: int, before: Mapping[str, delta.Bytes], after: Mapping[str, torch.Tensor], norm: float
) -> None:
    elements = changed_elements = changed_bytes = encoded = 0
    encode_seconds = apply_seconds = 0.0
    for name, parameter in after.items():
        old, new = before[name], read_bytes(parameter)
        elements += parameter.numel()
        changed_bytes += int((old != new).sum())
        changed_elements += int((old.view(np.uint16) != new.view(np.uint16)).sum())
        start = time.perf_counter()
        change = delta.encode(old, new, 2)
        encode_seconds += time.perf_counter() - start
        if change is not None:
            encoded += len(change.data)
            start = time.perf_counter()
            found = delta.decode(change.kind, change.data, old, old.size, 2)
            apply_seconds += time.perf_counter() - start
            assert np.array_equal(found, new)
    print(
        f"{lr:<7g} {step:>4}  {changed_elements / elements:>15.2%}  {changed_bytes / elements / 2:>13.2%}"
        f"  {encoded / elements / 2:>13.4f}  {encode_seconds:>8.2f}  {apply_seconds:>7.2f}  {norm:.2f}",
        flush=True,
    )


class Client:
    """A client of one server with one backend."""

    def __init__(self, folder: Path, url: str, backend: str, run_dir: Path) -> None:
        # Imported here: `changes` needs no client.
        from megarl.rollout.engines.sglang_servers import SGLangServers
        from megarl.sync.backends import BACKENDS as ROWS_BY_NAME
        from megarl.sync.plan import Plan, engine_targets
        from megarl.sync.transfer import Staging
        from megarl.weights.families import read_config

        config = Config(
            recipe="dapo",
            run_dir=run_dir,
            steps=4,
            model=ModelConfig(path=folder, dtype="bf16"),
            data=DataConfig(max_prompt_tokens=32),
            rollout=RolloutConfig(
                engine="sglang_url",
                urls=(url,),
                max_response_tokens=60,
                transfer_bucket=64,
                weights=WeightsConfig(backend=backend),  # type: ignore[arg-type]
            ),
        )
        hf = read_config(folder)
        self.engine = SGLangServers(config, hf, 0, 1, (1,))
        plan = Plan((), {}, dict(engine_targets(config, hf, 1)))
        self.backend = ROWS_BY_NAME[backend](config, 0, torch.device("cpu"), torch.bfloat16)
        parts = [plan.part(names) for names in self.backend.split(plan)]
        self.buckets = self.backend.connect(self.engine, parts, Staging(torch.device("cpu")))
        self.engine.start()
        while not self.engine.ready(10.0):
            pass

    def update(self, version: int, weights: Mapping[str, torch.Tensor]) -> tuple[float, int]:
        """Return seconds and bytes. Writing the buckets is not counted."""
        begin = time.perf_counter()
        self.backend.begin()
        seconds = time.perf_counter() - begin
        for number, bucket in enumerate(self.buckets):
            for name, tensor in bucket.items():
                tensor.copy_(weights[name])
            begin = time.perf_counter()
            self.backend.send(number, [self.backend.handle(number)], version)
            seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        self.backend.finish(version)
        seconds += time.perf_counter() - begin
        sent, self.backend.bytes_sent = self.backend.bytes_sent, 0
        assert not (notes := self.engine.take_notes()), notes
        return seconds, sent

    def read_weights(self) -> list[dict[str, str]]:
        for server in self.engine.pool.own:
            server.loading = True
        [ranks] = self.engine.read_checksums([]).values()
        for server in self.engine.pool.own:
            server.loading = False
        return [{name: value for name, value in rank.items() if "." in name} for rank in ranks]


def limit_loopback(rate: float) -> None:
    subprocess.run("tc qdisc del dev lo root 2>/dev/null", shell=True)
    if rate:
        shape = f"tc qdisc add dev lo root tbf rate {rate * 8:.0f}bit burst 2mb limit 64mb"
        subprocess.run(shape, shell=True, check=True)


def measure_backends(folder: Path, versions: Path, cases: list[int]) -> None:
    """Send the versions through each backend and print the table. Runs in its own network namespace."""
    from tests.sglang.test_servers import Server

    subprocess.run("ip link set lo up", shell=True, check=True)
    whole = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    server = Server(folder, versions / "log")
    options = ("--dtype", "bfloat16", "--custom-weight-loader", delta.LOADER)
    server.start(*options)
    print(f"\nweights {whole / 1e6:.0f} MB; seconds and ratios of the median update, {BACKENDS[0]} = 1")
    print(
        "link       lr     backend    first MB  first s  update MB  update s  MB ratio  s ratio  fingerprint"
    )
    try:
        for link, rate, lr, backends in (CASES[case] for case in cases):
            reference: tuple[float, float, Any] | None = None
            for backend in backends:
                reference = measure_backend(
                    folder, versions, server.url, (link, rate), lr, backend, reference
                )
    finally:
        server.kill()


def measure_backend(
    folder: Path, versions: Path, url: str, link: tuple[str, float], lr: float, backend: str, reference: Any
) -> Any:
    limit_loopback(0.0)
    client = Client(folder, url, backend, versions / f"run-{backend}")
    limit_loopback(link[1])
    found = [
        client.update(version, load_file(versions / f"{lr:g}-{step}.safetensors"))
        for version, step in enumerate(SENT_STEPS)
    ]
    limit_loopback(0.0)
    weights = client.read_weights()
    client.engine.stop()
    seconds, sent = (statistics.median(column) for column in zip(*found[1:], strict=True))
    if reference is None:
        reference = seconds, sent, weights
    print(
        f"{link[0]:<10} {lr:<6g} {backend:<9} {found[0][1] / 1e6:>9.1f}  {found[0][0]:>7.2f}"
        f"  {sent / 1e6:>9.2f}  {seconds:>8.2f}  {sent / reference[1]:>8.3f}  {seconds / reference[0]:>7.2f}"
        f"  {'equal' if weights == reference[2] else 'DIFFERENT'}",
        flush=True,
    )
    return reference


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M in bf16 (tests/pretrained.py)")
    every = range(len(CASES))
    parser.add_argument("--cases", type=int, nargs="*", default=list(every), choices=every, help="of CASES")
    parser.add_argument("--only", choices=("changes", "backends"))
    parser.add_argument(
        "--versions", type=Path, help="folder of the trained versions; default: a temporary one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        versions = arguments.versions or Path(temporary)
        versions.mkdir(exist_ok=True)
        if os.environ.get("MEGARL_NAMESPACE"):
            measure_backends(arguments.model, versions, arguments.cases)
            return
        if arguments.only != "backends":
            measure_changes(arguments.model, versions)
        if arguments.only != "changes":
            command = [sys.executable, __file__, str(arguments.model), "--versions", str(versions), "--cases"]
            command += [str(case) for case in arguments.cases]
            environment = os.environ | {"MEGARL_NAMESPACE": "1"}
            subprocess.run(["unshare", "--net", *command], env=environment, check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
