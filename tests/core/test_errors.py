"""Unexpected exceptions: whose they are, and what to do about them."""

from __future__ import annotations

import errno
import os

import pytest

from ensemblekit.core import errors
from ensemblekit.core.errors import EnsemblekitError, ResourceError, UsageError, explain, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("libx.so: cannot allocate memory"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_recognised_whoever_reports_it(error):
    assert is_out_of_memory(error)
    assert explain(error).exit_code == 7


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
        ValueError("can't allocate memory"),
        OSError(errno.ENOENT, "x"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_limit_of_the_address_space_is_named(monkeypatch):
    monkeypatch.setattr(errors, "address_space", lambda: 2**30)
    assert "raise the limit of 1.0 GiB (ulimit -v)" in explain(MemoryError()).fix
    loading = explain(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    assert loading.fix == "importing torch takes 4 GiB of address space: raise the limit of 1.0 GiB (ulimit -v)"
    monkeypatch.setattr(errors, "address_space", lambda: None)
    assert "ulimit" not in explain(MemoryError()).fix


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENAMETOOLONG, UsageError), (errno.ENOSPC, ResourceError), (errno.EMFILE, ResourceError)],
)
def test_failures_of_the_system_are_no_bugs(code, kind):
    error = explain(OSError(code, os.strerror(code), "a" * 300))
    assert type(error) is kind
    assert error.fix
    assert len(error.line) < 250


def test_anything_else_may_be_reported():
    error = explain(KeyError("x"))
    assert type(error) is EnsemblekitError
    assert "please report it" in error.fix
