"""pagegen's backend in vLLM: through vLLM's own classes, and in its own engine, where `make engines` installed them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_environment import PYTHON, ROOT, VLLM

from pagegen.integrations import smollm2, vllm
from pagegen.integrations.tiny_llama import tiny_llama

# 64 tokens a step: prompts come in chunks, beside the decodes of others
ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "block_size": 32, "max_num_batched_tokens": 64}
PROMPTS = [[(7 * i * i + n) % 256 for i in range(n)] for n in (1, 5, 33, 150, 17, 64)]


@pytest.mark.parametrize(("engine", "check"), [case for engine in VLLM for case in engine.cases()])
def test_through_the_classes_of(engine, check, record_property):
    record_property("host_version", engine.version)
    engine.checked(check)


def serve(engine, model: Path, prompts, tmp_path, **environment: str):
    """What vLLM's engine generated for each prompt, twice: the second time with its prefix cache."""
    request = {"prompts": prompts, "max_tokens": 24, "engine": ENGINE}
    database = str(tmp_path / "tuning.db")
    printed = engine.run("vllm_serve.py", str(model), json.dumps(request), PAGEGEN_DB=database, **environment)
    return json.loads(printed.splitlines()[-1])


def assert_pagegen_served_what_vllm_serves(engine, model, prompts, tmp_path, **environment: str):
    ours = serve(engine, model, prompts, tmp_path, PAGEGEN_VLLM_REPLACE="CPU_ATTN", **environment)
    theirs = serve(engine, model, prompts, tmp_path, PAGEGEN_VLLM_REPLACE="")
    assert (ours["backend"], theirs["backend"]) == ("PAGEGEN", "CPU_ATTN")
    for kind in ("decode", "mixed"):
        assert ours["calls"][f"PagegenImpl:{kind}"] > 0
        assert theirs["calls"][f"CPUAttentionBackendImpl:{kind}"] > 0
    assert not [kind for kind in ours["calls"] if not kind.startswith("PagegenImpl")]
    assert ours["tokens"][0] == ours["tokens"][1], "the prefix cache changed what was generated"
    assert ours["tokens"] == theirs["tokens"]
    distinct = {token for tokens in theirs["tokens"][0] for token in tokens}
    assert len(distinct) > 20, "a model that repeats itself compares nothing"


@pytest.fixture
def engine(record_property):
    """The release whose engine runs on this machine; skips where it is not installed."""
    record_property("host_version", VLLM[0].version)
    VLLM[0].need()
    return VLLM[0]


@pytest.mark.compat("vllm", "its own engine on the CPU: a random Llama, chunked prefill, prefix cache")
def test_vllms_engine_serves_a_random_llama_with_the_same_tokens_as_its_own_backend(engine, tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    assert_pagegen_served_what_vllm_serves(engine, tmp_path / "model", PROMPTS, tmp_path)


@pytest.mark.compat("vllm", "its own engine on the CPU: a random Gemma-2, sliding windows, soft caps, HND")
def test_vllms_engine_serves_windows_soft_caps_and_head_major_blocks_with_the_same_tokens(engine, tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=48, attn_logit_softcapping=5.0,
        max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = Gemma2ForCausalLM(config)
        model.model.embed_tokens.weight.mul_(0.1)  # a token says less of the next one than what is attended does
        model.save_pretrained(tmp_path / "model")
    assert_pagegen_served_what_vllm_serves(engine, tmp_path / "model", PROMPTS, tmp_path, VLLM_KV_CACHE_LAYOUT="HND")


@pytest.mark.compat("vllm", "its own engine on the CPU: SmolLM2-135M")
def test_vllms_engine_serves_smollm2_with_the_same_tokens_as_its_own_backend(engine, tmp_path):
    try:
        folder = smollm2.converted_folder()
    except smollm2.WeightsMissing as error:
        pytest.skip(str(error))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    story = "Once upon a time a small program had to find its way through a very large table of blocks. " * 6
    texts = ["The capital of France is", story, "def fibonacci(n):", "Water boils at"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert_pagegen_served_what_vllm_serves(engine, folder, prompts, tmp_path)


def test_importing_pagegen_and_its_plugin_does_not_import_vllm():
    code = "import sys, pagegen, pagegen.integrations.vllm; print('vllm' in sys.modules)"
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_entry_points_name_functions_that_are_there():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        found = re.search(rf'entry-points."{re.escape(group)}"\]\npagegen = "(.+)"', text)
        assert found is not None
        assert found[1] == f"pagegen.integrations.{module}:register"


class Absent:
    """Makes `import name` fail, as where it is not installed."""

    def __init__(self, monkeypatch, name):
        for known in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, name, None)


def test_without_vllm_the_plugin_says_in_one_line_what_to_install_and_registers_nothing(monkeypatch, caplog):
    Absent(monkeypatch, "vllm")
    vllm.register()
    (record,) = caplog.records
    assert record.getMessage().endswith("vLLM is not installed: pip install 'vllm>=0.32,<0.34'")


def test_without_vllm_the_module_of_its_classes_cannot_be_imported_and_says_why(monkeypatch):
    Absent(monkeypatch, "vllm")
    monkeypatch.delitem(sys.modules, "pagegen.integrations.vllm_backend", raising=False)
    with pytest.raises(ImportError, match="vLLM is not installed: pip install") as caught:
        import pagegen.integrations.vllm_backend  # noqa: F401
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", "1.0", "dev", "", None])
def test_a_vllm_of_another_version_is_refused_when_its_classes_are_asked_for(found, monkeypatch):
    host = type(sys)("vllm")
    if found is not None:
        host.__version__ = found
    monkeypatch.setitem(sys.modules, "vllm", host)
    monkeypatch.delitem(sys.modules, "pagegen.integrations.vllm_backend", raising=False)
    named = "of unknown version" if found is None else found
    with pytest.raises(ImportError, match=re.escape(f"vLLM {named} is not supported: install vllm>=0.32,<0.34")):
        import pagegen.integrations.vllm_backend  # noqa: F401


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.33.1.dev5+g1234567", "0.33.0rc1", "0.32.4+cpu"])
def test_a_supported_vllm_has_no_fault(found, monkeypatch):
    host = type(sys)("vllm")
    host.__version__ = found
    monkeypatch.setitem(sys.modules, "vllm", host)
    assert vllm.fault() is None
