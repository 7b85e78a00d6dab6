"""GGUF files (llama.cpp's) seen as Hugging Face tensors, so that a quantised model can be made a folder to
train from.

Weights are dequantised block by block by the package gguf; configuration and tokenizer are read by
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import pi
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megarl.config.errors import CheckpointError, ConfigError, first_line
from megarl.weights.families import Sizes, family_of, read_config
from megarl.weights.hf import ModelFolder, exported_config
from megarl.weights.megatron import Conversion, Watch, unwatched, write_hf
from megarl.weights.shards import Box, full_box, hf_shapes
from megarl.weights.tensor_files import damaged, write_json

# llama.cpp's names of architectures, and of these whether the rows of q and k stand in its own order: the
# two numbers that a rotation turns side by side, where Hugging Face has them half a head apart. Mistral's
# models are "llama" there too.
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False}
ROPE_FACTORS = "rope_freqs.weight"  # by which llama.cpp divides the frequencies: llama3's scaling
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)")


class GGUFFile(ModelFolder):
    """A GGUF file of a family that the table knows (`weights/families.py`).

    Raises ConfigError where the package gguf is missing; CheckpointError, naming file and tensor or key, for
    a file that is damaged, split, of another architecture or quantised in a way that is not read, and for
    tensors that are missing, superfluous or of another shape."""

    def __init__(self, path: Path) -> None:
        try:
            self._gguf: Any = import_module("gguf")
        except ImportError as error:
            missing = "the package gguf is not installed (pip install 'megarl[gguf]')"
            raise ConfigError(f"GGUF files: {missing}") from error
        self.path = Path(path)
        self._reader = self._open()
        self.architecture = self._known_architecture()
        self.config = self._read_config()
        self.shapes = hf_shapes(self.config)
        self.missing = ()
        sizes = Sizes.of(self.config)
        self._heads = (
            {"q_proj": sizes.heads, "k_proj": sizes.kv_heads} if INTERLEAVED[self.architecture] else {}
        )
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._names = self._check_tensors(sizes.layers)

    def dtype(self, name: str) -> torch.dtype:
        """Return float32: what a quantised tensor is dequantised to."""
        return torch.float32

    def files(self, name: str) -> list[tuple[Path, Box]]:
        return [(self.path, full_box(self.shapes[name]))]

    def read(self, name: str, box: Box) -> Tensor:
        """Return `tensor[box]`, dequantised to float32."""
        of, expert = self._names[name]
        found = self._tensors[of]
        data = found.data if expert is None else found.data[expert]
        rows = torch.arange(*box[0])
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if heads := self._heads.get(kind):
            # Of a head, the row at (half, i) in Hugging Face's order is the one at (i, half) here.
            half = self.shapes[name][0] // heads // 2
            head, rest = rows // (2 * half), rows % (2 * half)
            rows = head * 2 * half + rest % half * 2 + rest // half
        values = self._gguf.dequantize(data[rows.numpy()], found.tensor_type)
        return (
            torch.from_numpy(values).float()[(slice(None), *(slice(*side) for side in box[1:]))].contiguous()
        )

    def _open(self) -> Any:
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: {'not a file' if self.path.exists() else 'no such file'}")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{self.path}: not a GGUF file (its first four bytes are not GGUF)")
        try:
            return self._gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
            problem = f"truncated or damaged ({first_line(error)}; download it again)"
            raise CheckpointError(f"{self.path}: {problem}") from error

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _known_architecture(self) -> str:
        """Return general.architecture; refuse what the table cannot say."""
        name = self._value("general.architecture")
        if name not in INTERLEAVED:
            known = ", ".join(INTERLEAVED)
            raise CheckpointError(f"{self.path}: general.architecture: {name!r} is not read (known: {known})")
        if self._value("split.count", 1) > 1:
            remedy = "join its parts with llama-gguf-split --merge"
            raise CheckpointError(f"{self.path}: split.count: is one of several parts ({remedy})")
        kind = self._value(f"{name}.rope.scaling.type", "none")
        if kind != "none":
            where = f"{self.path}: {name}.rope.scaling.type"
            raise CheckpointError(f"{where}: {kind!r} is not read (only files without it)")
        window = self._value(f"{name}.attention.sliding_window", 0)
        if window:
            where = f"{self.path}: {name}.attention.sliding_window"
            raise CheckpointError(f"{where}: {window} is not supported (only full attention is)")
        return name

    def _read_config(self) -> dict[str, Any]:
        """Return config.json as transformers reads it from the file."""
        from transformers import AutoConfig

        with self._named("configuration"):
            made = AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            ).to_diff_dict()
        config = {key: value for key, value in made.items() if not key.startswith("_")}
        # What transformers' reader leaves at its defaults for some of these architectures.
        for key, theirs in (
            ("head_dim", "attention.key_length"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ):
            if (size := self._value(f"{self.architecture}.{theirs}")) is not None:
                config[key] = size
        # Of the numbers that Hugging Face's files have, the nearest float32: written as short as it can be.
        config["rms_norm_eps"] = float(f"{made['rms_norm_eps']:.7g}")
        config["tie_word_embeddings"] = "output.weight" not in {t.name for t in self._reader.tensors}
        if rope := self._scaled_rope(config):
            config["rope_parameters"] = rope
        with TemporaryDirectory() as folder:  # the checks of a folder's config.json, before anything is read
            write_json(Path(folder) / "config.json", config)
            try:
                checked = read_config(Path(folder))
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {str(error).removeprefix(folder).lstrip('/')}") from None
        return exported_config({**checked, "dtype": "float32"}, False, None)

    def _scaled_rope(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return llama3's rope parameters where the file has its factors, which llama.cpp computes from them
        (Llama 3.1 and later: low 1, high 4, 8,192 positions, factor 8 or 32). transformers leaves them
        out."""
        factors = next((t for t in self._reader.tensors if t.name == ROPE_FACTORS), None)
        if factors is None:
            return None
        found = torch.tensor(factors.data).float()
        low, high, positions = 1.0, 4.0, 8192
        rope = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)})
        wavelength = 2 * pi * rope["rope_theta"] ** (torch.arange(len(found)) / len(found))
        factor = float(found.max())
        smooth = (positions / wavelength - low) / (high - low)
        expected = torch.where(
            wavelength < positions / high,
            torch.ones_like(found),
            torch.where(
                wavelength > positions / low,
                torch.full_like(found, factor),
                1 / ((1 - smooth) / factor + smooth),
            ),
        )
        if not torch.allclose(found, expected, rtol=1e-4):
            problem = "are not those of llama3's rope scaling (only these are read)"
            raise damaged(self.path, ROPE_FACTORS, problem)
        return {
            **rope,
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": positions,
        }

    def _check_tensors(self, layers: int) -> dict[str, tuple[str, int | None]]:
        """Return, for each tensor of the model, its name in the file and its expert there."""
        arch = next(a for a, text in self._gguf.MODEL_ARCH_NAMES.items() if text == self.architecture)
        table = self._gguf.get_tensor_name_map(arch, layers)
        names: dict[str, tuple[str, int | None]] = {}
        for name, shape in self.shapes.items():
            module, _, suffix = name.rpartition(".")
            expert = EXPERT.fullmatch(module)
            theirs = table.get_name(f"{expert[1]}.{expert[3]}" if expert else module)
            of = f"{theirs}.{suffix}"
            if theirs is None or of not in self._tensors:
                raise damaged(
                    self.path, of if theirs else name, f"is missing ({family_of(self.config).prefix})"
                )
            # In GGUF the dimension that runs fastest comes first.
            stored = tuple(int(size) for size in reversed(self._tensors[of].shape))
            if (stored[1:] if expert else stored) != shape or (expert and int(expert[2]) >= stored[0]):
                raise damaged(self.path, of, f"shape {stored}, but the model has {shape}")
            names[name] = of, int(expert[2]) if expert else None
        unknown = {*self._tensors} - {of for of, _ in names.values()} - {ROPE_FACTORS}
        if unknown:
            family = self.config["model_type"]
            raise damaged(self.path, min(unknown), f"a {family} model has no such tensor")
        for tensor in {t.tensor_type: t for t in self._tensors.values()}.values():
            first = tensor.data.reshape(-1, tensor.data.shape[-1])[:1]
            try:
                self._gguf.dequantize(first, tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise damaged(self.path, tensor.name, f"quantisation {kind} is not read") from None
        return names

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer with its chat template, and which tokens end a response, as transformers'
        files."""
        from transformers import AutoTokenizer, GenerationConfig

        with self._named("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        tokenizer.save_pretrained(folder)
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Name the file in an error of transformers."""
        try:
            yield
        except Exception as error:  # tokenizers raises nothing more particular
            raise CheckpointError(f"{self.path}: {what} is not read: {first_line(error)}") from error


def gguf_to_hf(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4 << 30,
    verify: bool = False,
    watch: Watch = unwatched,
) -> Conversion:
    """Write the model of a GGUF file as a Hugging Face folder, with tokenizer and chat template.

    dtype: of every tensor. verify: read back and compare. Raises the errors of `GGUFFile`, and
    CheckpointError where `out` exists or cannot be written."""
    model = GGUFFile(source)
    kinds = dict.fromkeys(model.shapes, dtype)
    with TemporaryDirectory() as beside:
        model.save_tokenizer(Path(beside))
        config = exported_config(model.config, False, dtype)
        write_json(Path(beside) / "config.json", config)
        return write_hf(model, out, kinds, config, Path(beside), max_shard_bytes, verify, watch)
