"""A GGUF file of a known model in bfloat16, for llama.cpp: the same weights as Slipstream serves, not requantised ones.

Matrices become bfloat16, norms stay float32, metadata (tokenizer included) is copied.
Format: as ``slipstream.models.gguf``.
"""

from __future__ import annotations

from pathlib import Path

import gguf

from slipstream.models.gguf import GgufFile


def write_bfloat16(source: Path, file: Path) -> Path:
    """``source`` as ``file``, which is whole when it exists. Raises ModelError."""
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors, reader = GgufFile(source), gguf.GGUFReader(source)
    fresh = file.with_suffix(".part")
    writer = gguf.GGUFWriter(fresh, tensors.value("general.architecture", str))
    for field in reader.fields.values():
        if field.name in ("general.architecture", "general.file_type") or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, shape in tensors.tensor_shapes.items():
        kept = len(shape) == 1
        stored = gguf.GGMLQuantizationType.F32 if kept else gguf.GGMLQuantizationType.BF16
        values = tensors.tensor(name)
        writer.add_tensor(name, values if kept else gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return fresh.rename(file)
