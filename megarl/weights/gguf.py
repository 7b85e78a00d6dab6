"""Convert GGUF files (llama.cpp) to Hugging Face folders.

The package gguf dequantises, transformers reads configuration and tokenizer. gguf's reader is slow and
trusts any length, so the header is read here. transformers' conversion needs memory for the whole model,
skips unknown tensors, drops Llama 3.1's rope scaling, and cannot be saved."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.config.errors import CheckpointError, ConfigError, first_line
from megarl.weights.boxes import Box, full_box
from megarl.weights.families import Shape, Sizes, get_family, read_config
from megarl.weights.hf import ModelFolder, export_config
from megarl.weights.megatron import Conversion, Watch, ignore_progress, write_hf
from megarl.weights.shards import hf_shapes
from megarl.weights.tensor_files import tensor_error, write_json

# By architecture ("llama" includes Mistral): whether rows of q and k that rotate together are adjacent, not
# half a head away.
INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False}
ROPE_FACTORS = "rope_freqs.weight"  # llama3's divisors of frequencies
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)")


MAX_KEYS, MAX_TENSORS, MAX_DIMS = 1 << 16, 1 << 20, 4
MAX_ELEMENTS = 1 << 22  # of all arrays: thrice a vocabulary of 256,000 with merges
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """data: uint8 [..., row bytes]; shape: dequantised."""

    name: str
    shape: Shape
    kind: Any
    data: Any


class Header:
    """The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

    Raises ValueError for anything beyond the file or unknown. values: without arrays"""

    def __init__(self, path: Path, gguf: Any) -> None:
        self._bytes: Any = np.memmap(path, np.uint8, "r")
        self._at, self._elements = 4, 0
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not read")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise ValueError(f"declares {num_tensors:,} tensors and {num_keys:,} keys")
        values = [(self._text(), self._value(self._number("I"))) for _ in range(num_keys)]
        self.values = {name: value for name, value in values if value is not None}
        tensor_infos = [self._place(gguf) for _ in range(num_tensors)]
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment: {alignment}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {}
        for name, shape, kind, offset in tensor_infos:
            rows = gguf.quant_shape_to_byte_shape(shape, kind)
            self._at = start + offset
            self.tensors[name] = StoredTensor(name, shape, kind, self._take(prod(rows)).reshape(rows))

    def _take(self, size: int) -> Any:
        if self._at + size > len(self._bytes):
            raise ValueError(f"at byte {self._at:,} it declares {size:,} bytes more than there are")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _number(self, kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self._take(size))
        return value

    def _text(self) -> str:
        return self._take(self._number("Q")).tobytes().decode("utf-8")

    def _value(self, kind: int) -> Any:
        """Return None for arrays."""
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise ValueError(f"a value of kind {kind} is not read")
        kind, count = self._number("I"), self._number("Q")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"its arrays have {self._elements:,} elements, more than {MAX_ELEMENTS:,}")
        if kind in NUMBERS:
            self._take(count * struct.calcsize(f"<{NUMBERS[kind]}"))
        elif kind == TEXT:
            for _ in range(count):
                self._take(self._number("Q"))
        else:
            raise ValueError(f"an array of kind {kind} is not read")
        return None

    def _place(self, gguf: Any) -> tuple[str, Shape, Any, int]:
        name, dims = self._text(), self._number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions")
        # Fastest dimension first.
        shape = tuple(self._number("Q") for _ in range(dims))[::-1]
        return name, shape, gguf.GGMLQuantizationType(self._number("I")), self._number("Q")


class GGUFFile(ModelFolder):
    """A GGUF file of a family in `weights/families.py`.

    Raises ConfigError without the package gguf, and CheckpointError for a damaged, split or unsupported file,
    or tensors that do not match the model."""

    def __init__(self, path: Path) -> None:
        try:
            self._gguf: Any = import_module("gguf")
        except ImportError as error:
            missing = "the package gguf is not installed (pip install 'megarl[gguf]')"
            raise ConfigError(f"GGUF files: {missing}") from error
        self.path = Path(path)
        self._header = self._open()
        self.architecture = self._known_architecture()
        self.config = self._read_config()
        self.shapes = hf_shapes(self.config)
        self.missing = ()
        sizes = Sizes.from_config(self.config)
        self._heads = (
            {"q_proj": sizes.heads, "k_proj": sizes.kv_heads} if INTERLEAVED[self.architecture] else {}
        )
        self._tensors = self._header.tensors
        self._names = self._check_tensors(sizes.layers)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def files(self, name: str) -> list[tuple[Path, Box]]:
        return [(self.path, full_box(self.shapes[name]))]

    def read(self, name: str, box: Box) -> Tensor:
        """Return float32."""
        stored_name, expert = self._names[name]
        tensor = self._tensors[stored_name]
        data = tensor.data if expert is None else tensor.data[expert]
        rows = torch.arange(*box[0])
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if heads := self._heads.get(projection):
            # A head's row (half, i) in Hugging Face is (i, half) here.
            half = self.shapes[name][0] // heads // 2
            head_index, row_in_head = rows // (2 * half), rows % (2 * half)
            rows = head_index * 2 * half + row_in_head % half * 2 + row_in_head // half
        if len(box) == 1:
            values = self._gguf.dequantize(data, tensor.kind)[rows.numpy()]
        else:
            values = self._gguf.dequantize(data[rows.numpy()], tensor.kind)
        trailing = (slice(*bounds) for bounds in box[1:])
        return torch.from_numpy(values).float()[(slice(None), *trailing)].contiguous()

    def _open(self) -> Header:
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: {'not a file' if self.path.exists() else 'no such file'}")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{self.path}: not a GGUF file (its first four bytes are not GGUF)")
        try:
            return Header(self.path, self._gguf)
        except (ValueError, OSError) as error:
            problem = f"truncated or damaged ({first_line(error)}; download it again)"
            raise CheckpointError(f"{self.path}: {problem}") from error

    def _value(self, key: str, default: Any = None) -> Any:
        return self._header.values.get(key, default)

    def _known_architecture(self) -> str:
        """Return the architecture, or raise CheckpointError if unsupported."""
        architecture = self._value("general.architecture")
        scaling_key = f"{architecture}.rope.scaling.type"
        window_key = f"{architecture}.attention.sliding_window"
        if architecture not in INTERLEAVED:
            problem = f"general.architecture: {architecture!r} is not read (known: {', '.join(INTERLEAVED)})"
        elif self._value("split.count", 1) > 1:
            remedy = "join its parts with llama-gguf-split --merge"
            problem = f"split.count: is one of several parts ({remedy})"
        elif (scaling := self._value(scaling_key, "none")) != "none":
            problem = f"{scaling_key}: {scaling!r} is not read (only files without it)"
        elif window := self._value(window_key, 0):
            problem = f"{window_key}: {window} is not supported (only full attention is)"
        else:
            return str(architecture)
        raise CheckpointError(f"{self.path}: {problem}")

    def _read_config(self) -> dict[str, Any]:
        """Correct and check transformers' config."""
        from transformers import AutoConfig

        with self._convert_errors("configuration"):
            gguf_config = AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            ).to_diff_dict()
        config = {key: value for key, value in gguf_config.items() if not key.startswith("_")}
        # transformers ignores these keys for some architectures.
        for key, gguf_key in (
            ("head_dim", "attention.key_length"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ):
            if (size := self._value(f"{self.architecture}.{gguf_key}")) is not None:
                config[key] = size
        # Restore Hugging Face's short decimal from float32.
        config["rms_norm_eps"] = float(f"{gguf_config['rms_norm_eps']:.7g}")
        config["tie_word_embeddings"] = "output.weight" not in self._header.tensors
        if rope := self._scaled_rope(config):
            config["rope_parameters"] = rope
        with TemporaryDirectory() as folder:
            write_json(Path(folder) / "config.json", config)
            try:
                checked_config = read_config(Path(folder))
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {str(error).removeprefix(folder).lstrip('/')}") from None
        return export_config({**checked_config, "dtype": "float32"}, False, None)

    def _scaled_rope(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return llama3's rope parameters, which transformers ignores, if the file has factors.

        These must be Llama 3.1's."""
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = self._header.tensors.get(ROPE_FACTORS)
        if factors is None:
            return None
        divisors = torch.tensor(self._gguf.dequantize(factors.data, factors.kind)).float()
        rope: dict[str, Any] = {
            **(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}),
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        llama = LlamaConfig(head_dim=2 * len(divisors), rope_parameters=dict(rope))
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](llama, torch.device("cpu"))
        unscaled_frequencies = rope["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
        if not torch.allclose(divisors, unscaled_frequencies / frequencies, rtol=1e-4):
            problem = "are not those of llama3's rope scaling (only these are read)"
            raise tensor_error(self.path, ROPE_FACTORS, problem)
        return rope

    def _check_tensors(self, layers: int) -> dict[str, tuple[str, int | None]]:
        """Return (stored name, expert) by tensor."""
        arch = next(a for a, text in self._gguf.MODEL_ARCH_NAMES.items() if text == self.architecture)
        table = self._gguf.get_tensor_name_map(arch, layers)
        names: dict[str, tuple[str, int | None]] = {}
        for name, shape in self.shapes.items():
            module, _, suffix = name.rpartition(".")
            expert_match = EXPERT.fullmatch(module)
            stored_module = table.get_name(f"{expert_match[1]}.{expert_match[3]}" if expert_match else module)
            stored_name = f"{stored_module}.{suffix}"
            if stored_module is None or stored_name not in self._tensors:
                missing_name = stored_name if stored_module else name
                raise tensor_error(self.path, missing_name, f"is missing ({get_family(self.config).prefix})")
            stored_shape = self._tensors[stored_name].shape
            if (stored_shape[1:] if expert_match else stored_shape) != shape or (
                expert_match and int(expert_match[2]) >= stored_shape[0]
            ):
                raise tensor_error(self.path, stored_name, f"shape {stored_shape}, but the model has {shape}")
            names[name] = stored_name, int(expert_match[2]) if expert_match else None
        unknown_names = {*self._tensors} - {stored_name for stored_name, _ in names.values()} - {ROPE_FACTORS}
        if unknown_names:
            family = self.config["model_type"]
            raise tensor_error(self.path, min(unknown_names), f"a {family} model has no such tensor")
        for tensor in {t.kind: t for t in self._tensors.values()}.values():
            first_row = tensor.data.reshape(-1, tensor.data.shape[-1])[:1]
            try:
                self._gguf.dequantize(first_row, tensor.kind)
            except NotImplementedError:
                problem = f"quantisation {tensor.kind.name} is not read"
                raise tensor_error(self.path, tensor.name, problem) from None
        return names

    def save_tokenizer(self, folder: Path) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        with self._convert_errors("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            )
        tokenizer.save_pretrained(folder)
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        GenerationConfig(**ids, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)

    @contextmanager
    def _convert_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tokenizers raises plain Exceptions
            raise CheckpointError(f"{self.path}: {what} is not read: {first_line(error)}") from error


def gguf_to_hf(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 4 << 30,
    verify: bool = False,
    watch: Watch = ignore_progress,
) -> Conversion:
    """Convert a GGUF file to a Hugging Face folder with tokenizer and chat template.

    Raises `GGUFFile`'s errors, and CheckpointError if `out` exists or cannot be written.

    dtype: of every tensor"""
    model = GGUFFile(source)
    dtypes = dict.fromkeys(model.shapes, dtype)
    with TemporaryDirectory() as carried_folder:
        model.save_tokenizer(Path(carried_folder))
        config = export_config(model.config, False, dtype)
        write_json(Path(carried_folder) / "config.json", config)
        return write_hf(model, out, dtypes, config, Path(carried_folder), max_shard_bytes, verify, watch)
