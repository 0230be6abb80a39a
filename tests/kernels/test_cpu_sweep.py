"""A slice of the random sweep on the CPU target (`make sweep` runs all of it), and that the sweep can fail."""

from __future__ import annotations

import pytest
import sweep
import sweep_cases
import sweep_checks

from pagegen.targets import cpu

KERNELS = 4
SEED = 1


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if cpu.compiler() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("kernel", range(KERNELS))
def test_reference_and_template_agree_with_the_kernels_of_a_random_slice(kernel: int) -> None:
    each = sweep_cases.CASES_A_KERNEL["cpu"]
    failures = sweep.failures_of("cpu", list(sweep.numbers(each * KERNELS, SEED))[each * kernel : each * (kernel + 1)])
    assert not failures, "\n".join(failures)


def test_a_case_is_drawn_from_its_number_alone() -> None:
    first = [str(sweep_cases.draw(target, n)) for target in ("cpu", "interpreter") for n in (12, 5, 12)]
    assert first[0] == first[2] != first[1]
    assert first[3] == first[5] != first[4]


def test_a_failing_case_is_one_line_that_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    number = sweep.numbers(1, SEED)[0]

    def wrong(kernel: object, batch: object) -> tuple[object, object]:
        out, lse = run(kernel, batch)
        return out + 1.0, lse

    run = sweep_checks.run
    monkeypatch.setattr(sweep_checks, "run", wrong)
    (line,) = sweep.failures_of("cpu", [number])
    assert line.startswith(
        f"python tests/kernels/sweep.py --target cpu --only {number}  # AssertionError: out differs by"
    )
    assert "\n" not in line
