"""The forms that the prefix index has, for tests that must hold in each."""

from __future__ import annotations

import pytest

from pagegen.cache import pool, prefix, prefix_compiled

FORMS = {"python": prefix.PrefixIndex, "compiled": prefix_compiled.CompiledIndex}
DIGEST = "std::memcpy(digest, h, DIGEST_BYTES);"


@pytest.fixture(params=FORMS)
def index_class(request, monkeypatch):
    """Every allocator that a test makes has an index of this class."""
    if request.param == "compiled" and not prefix_compiled.available():
        pytest.skip("no C++ compiler works here")
    monkeypatch.setattr(pool, "open_index", FORMS[request.param])
    return FORMS[request.param]


def changed_library(text, replacement):
    """The compiled functions of a source in which `text` was replaced."""
    source = prefix_compiled.source()
    assert source.count(text) == 1
    return prefix_compiled.load(source.replace(text, replacement))


@pytest.fixture
def colliding_names(index_class, monkeypatch):
    """All first blocks have one name, and all others another."""
    assert prefix.root_digest(b"")[2] and prefix.root_digest(b"x")[2]
    monkeypatch.setattr(prefix, "block_digest", lambda parent, tokens: bytes([parent[2] != 0]) + bytes(31))
    if index_class is prefix_compiled.CompiledIndex:
        weak = changed_library(DIGEST, "std::memset(digest, 0, DIGEST_BYTES); digest[0] = parent[2] != 0;")
        monkeypatch.setattr(prefix_compiled, "library", lambda: weak)
