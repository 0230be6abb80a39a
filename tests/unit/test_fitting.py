"""Coefficients fitted to a device's trials: what they recover, how their error is told, and when they are used."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from database_fakes import CPU, DECODE, H100, LAYOUT, PROFILE, SM_90, SPEC, cpu_trial, rule, trial
from pagegen_autotune import fitting
from pagegen_autotune.fitting import Case

from pagegen import costs, selection, targets
from pagegen.costs.fitted import COST_MODEL, MAX_FACTOR, Fit
from pagegen.db import open_db
from pagegen.db.fits import newest_fit, recent_trials
from pagegen.spec import CompileFacts, CppVariant, Status, TritonVariant, Workload

needs_sklearn = pytest.mark.skipif(not fitting.is_available(), reason="needs scikit-learn")
VARIANTS = [CppVariant(tile_kv=tile, streams=streams) for tile in (32, 64, 128) for streams in (2, 4)]
BATCHES = [Workload(context_lens=(200 * k,) * n) for k in (1, 4, 20) for n in (1, 4, 16)]


def made_trials(us, *, variants=tuple(VARIANTS), batches=tuple(BATCHES)):
    """A trial of every variant on every batch, of `us(predicted, variant, batch)` microseconds."""
    found = []
    for batch in batches:
        for variant in variants:
            predicted = costs.predict_us(SPEC, LAYOUT, variant, CPU, batch)
            found.append(cpu_trial(variant=variant, workload=batch, samples_us=(us(predicted, variant, batch),)))
    return found


def fitted(us, **options) -> Fit | None:
    return fitting.fit(fitting.cases_of(made_trials(us, **options), CPU), CPU, "cpp")


def plain_fit(**changes) -> Fit:
    fields = {
        "device": "fake CPU", "family": "cpp", "code_hash": "cpp", "intercept": math.log(2.0),
        "coefficients": {"tile_kv": 0.1}, "ranges": {"tile_kv": (5.0, 6.0, 7.0)}, "trials": 54, "batches": 9,
        "error": 0.05, "unfitted_error": 0.5, "regret": 0.0, "unfitted_regret": 0.1,
    }  # fmt: skip
    return Fit(**{**fields, **changes})


def slower(fit: Fit, variant=VARIANTS[0], batch=BATCHES[0]) -> float:
    """What the fit multiplies a prediction by."""
    return fit.factor(costs.parts(SPEC, LAYOUT, variant, CPU, batch), variant)


# --- fitting --------------------------------------------------------------------------------------------------


@needs_sklearn
def test_a_device_that_is_uniformly_slower_is_found_to_be():
    fit = fitted(lambda predicted, variant, batch: 1.7 * predicted)
    assert fit.unfitted_error == pytest.approx(0.7) and fit.error < 0.01 and fit.is_better
    assert slower(fit) == pytest.approx(1.7, rel=0.02)
    assert (fit.trials, fit.batches) == (54, 9)


@needs_sklearn
def test_what_the_model_does_not_know_of_a_variant_is_learned_and_chooses_better():
    """The model sees no harm in two streams; here they take twice the time."""

    def us(predicted, variant, batch):
        return predicted * (2.0 if variant.streams == 2 else 1.0)

    fit = fitted(us)
    assert fit.error < 0.2 * fit.unfitted_error
    assert fit.regret == 0.0 <= fit.unfitted_regret
    few, many = (slower(fit, CppVariant(tile_kv=64, streams=n)) for n in (2, 4))
    assert few / many == pytest.approx(2.0, rel=0.15)


@needs_sklearn
def test_the_error_is_that_of_batches_that_were_not_fitted_to():
    """Each batch has an error of its own that nothing tells beforehand."""
    rng = random.Random(3)
    own = {batch: math.exp(rng.uniform(-1, 1)) for batch in BATCHES}
    fit = fitted(lambda predicted, variant, batch: predicted * own[batch])
    assert fit.error > 0.8 * fit.unfitted_error and not fit.is_better


@needs_sklearn
def test_coefficients_of_noise_are_near_none_and_a_fit_that_does_not_help_is_not_used():
    rng = random.Random(7)
    fit = fitted(lambda predicted, variant, batch: predicted * math.exp(rng.gauss(0, 0.3)))
    assert abs(math.log(slower(fit))) < 0.3
    assert not replace(fit, error=fit.unfitted_error).is_better
    assert not replace(fit, regret=fit.unfitted_regret + 0.01).is_better  # a smaller error that chooses worse


@needs_sklearn
def test_coefficients_that_would_choose_worse_give_way_to_one_factor_which_changes_no_order(monkeypatch):
    """All takes twice the time; that coefficients choose worse is made up, as it was seen on recorded grids."""
    rng = random.Random(5)
    own = {variant: math.exp(rng.uniform(-0.3, 0.3)) for variant in VARIANTS}
    monkeypatch.setattr(fitting, "choice_regret", lambda cases, us: 0.3 if _reordered(cases, us) else 0.2)
    fit = fitted(lambda predicted, variant, batch: 2.0 * predicted * own[variant])
    assert fit.coefficients == {} and fit.is_better
    assert slower(fit) == pytest.approx(2.0, rel=0.2)


def _reordered(cases, predicted_us) -> bool:
    """Whether the predictions are more than one factor a fold away from the model's."""
    factors = {round(us / case.parts.total_us, 6) for case, us in zip(cases, predicted_us, strict=True)}
    return len(factors) > fitting.FOLDS


@needs_sklearn
def test_too_few_trials_or_batches_fit_nothing():
    one = made_trials(lambda p, v, b: 2 * p, batches=BATCHES[:2])
    assert fitting.fit(fitting.cases_of(one, CPU), CPU, "cpp") is None
    few = made_trials(lambda p, v, b: 2 * p, variants=VARIANTS[:2])
    assert fitting.fit(fitting.cases_of(few, CPU), CPU, "cpp") is None
    assert fitting.fit([], CPU, "cpp") is None


@needs_sklearn
def test_kernels_of_two_families_are_not_fitted_together():
    parts = costs.Parts(fixed_us=1.0)
    two = [Case(parts=parts, variant=v, measured_us=2.0, group=0) for v in (CppVariant(), TritonVariant())]
    with pytest.raises(ValueError, match="one kernel family, got cpp, triton"):
        fitting.fit(two, CPU, "x")


def test_failed_trials_are_no_cases_and_samples_of_one_question_are_one():
    bad = cpu_trial(status=Status.TIMEOUT, samples_us=())
    twice = [cpu_trial(samples_us=(10.0, 30.0)), cpu_trial(samples_us=(20.0,)), bad]
    (case,) = fitting.cases_of(twice, CPU)
    assert case.measured_us == 20.0 and case.group == (SPEC, DECODE)


def test_gpu_cases_take_the_compilers_facts_of_the_form_that_ran():
    variant = TritonVariant(page_walk="any")
    facts = CompileFacts(
        spec=SPEC, layout=LAYOUT, target=SM_90, variant=variant, form="decode", code_hash="c0de", programs_per_unit=1,
        loop={"instructions": 9000},
    )  # fmt: skip
    one = trial(variant=variant)
    (plain,), (told,) = (
        fitting.cases_of([one], H100, known) for known in (None, {(SPEC, LAYOUT, variant, "decode"): facts})
    )
    assert told.parts.issue_us > 5 * plain.parts.issue_us


def test_without_scikit_learn_the_error_names_the_extra_and_tuning_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(fitting, "is_available", lambda: False)
    cases = fitting.cases_of(made_trials(lambda p, v, b: p), CPU)
    with pytest.raises(fitting.MissingExtra, match=r"pip install pagegen-attention\[fit\]"):
        fitting.fit(cases, CPU, "cpp")
    with pytest.raises(fitting.MissingExtra):
        fitting.correction(cases)
    with open_db(tmp_path / "t.db", shipped=False) as db:
        db.record(cpu_trial())
        assert fitting.of_store(db, CPU, "cpp") is None


def test_importing_the_tuner_does_not_load_scikit_learn():
    import subprocess
    import sys

    code = "import sys, pagegen_autotune.tuner; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]).returncode == 0


# --- the value -----------------------------------------------------------------------------------------------


def test_a_fit_is_the_same_after_a_round_trip():
    fit = plain_fit()
    again = Fit.from_dict(json.loads(json.dumps(fit.to_dict())))
    assert again == fit and hash(again) == hash(fit)
    assert "54 trials of fake CPU (error on other batches 5%, unfitted 50%)" in str(fit)


@pytest.mark.parametrize(
    "changes",
    [{"intercept": math.nan}, {"coefficients": {"tile_kv": math.inf}}, {"ranges": {}}, {"error": math.nan},
     {"ranges": {"tile_kv": (7.0, 6.0, 5.0)}}],
)  # fmt: skip
def test_numbers_that_cannot_be_a_fit_are_refused(changes):
    with pytest.raises(ValueError, match="a fit"):
        plain_fit(**changes)


def test_a_fit_of_another_version_or_of_other_features_is_refused():
    with pytest.raises(ValueError, match="version"):
        Fit.from_dict({**plain_fit().to_dict(), "version": 99})
    other = plain_fit(coefficients={"moon phase": 1.0}, ranges={"moon phase": (0.0, 0.0, 1.0)})
    with pytest.raises(ValueError, match="moon phase"):
        slower(other)


def test_beyond_what_was_tried_a_coefficient_goes_no_further():
    fit = plain_fit(intercept=0.0, coefficients={"tile_kv": 1.0})
    inside, outside = (slower(fit, CppVariant(tile_kv=tile)) for tile in (128, 256))
    assert inside == pytest.approx(math.exp(math.log2(129) - 6.0), rel=0.02) and outside == math.exp(1.0)
    assert slower(plain_fit(intercept=100.0)) == pytest.approx(MAX_FACTOR)
    assert slower(plain_fit(intercept=-100.0)) == pytest.approx(1 / MAX_FACTOR)


def test_no_fit_makes_a_prediction_beat_the_roofline():
    quick = plain_fit(intercept=-100.0)
    us = costs.predict_us(SPEC, LAYOUT, CppVariant(), CPU, DECODE, fit=quick)
    assert us == costs.roofline_us(SPEC, LAYOUT, CPU, DECODE)


# --- stored and used --------------------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "code_hash", lambda target: "cpp" if target.kind == "cpu" else "c0de")
    monkeypatch.setattr(targets, "current_device", lambda target: CPU if target.kind == "cpu" else _absent(target))
    with open_db(tmp_path / "tuning.db", shipped=False) as found:
        yield found


def _absent(target):
    raise ValueError(f"{target} is not here")


def store(db, fit: dict, *, spec=SPEC) -> None:
    made = rule(CppVariant())
    made.evidence[COST_MODEL] = fit
    db.save_portfolio(spec=spec, layout=LAYOUT, device=CPU, profile=PROFILE, rule=made, code_hash="cpp")


def test_the_newest_coefficients_of_a_device_are_found_whatever_spec_they_ride_with(db):
    store(db, plain_fit().to_dict(), spec=SPEC.replace(window=64))
    assert newest_fit(db, CPU, "cpp") == plain_fit()
    assert newest_fit(db, CPU, "other code") is None
    assert newest_fit(db, replace(CPU, name="another CPU"), "cpp") is None
    assert newest_fit(db, replace(CPU, bandwidth_gb_s=1.0), "cpp") == plain_fit()  # rates are no part of a device


@pytest.mark.parametrize(
    "stored",
    [{"version": 99}, "nonsense", plain_fit(error=0.6).to_dict(), plain_fit(family="triton").to_dict(),
     {**plain_fit().to_dict(), "intercept": "x"}],
    ids=["version", "text", "no better", "family", "damaged"],
)  # fmt: skip
def test_coefficients_that_are_damaged_of_another_kind_or_no_better_are_not_used(db, stored):
    store(db, stored)
    assert newest_fit(db, CPU, "cpp") is None
    assert db.select(SPEC, LAYOUT, "cpu", DECODE).predicted_us is not None


def test_selection_predicts_with_the_stored_coefficients_and_says_so(db):
    unfitted = costs.predict_us(SPEC, LAYOUT, CppVariant(), CPU, DECODE)
    store(db, plain_fit().to_dict())
    chosen = db.select(SPEC, LAYOUT, "cpu", DECODE)
    assert chosen.predicted_us == pytest.approx(unfitted * slower(plain_fit(), CppVariant()), rel=1e-6)
    assert "54 trials of fake CPU" in chosen.evidence["cost_model"]
    (row, *_) = selection.best_block_size(SPEC, "cpu", PROFILE, db=db)
    plain = costs.predict_us(SPEC, LAYOUT, CppVariant(), CPU, DECODE)
    assert row.kind == "predicted" and row.step_us > 1.2 * plain


def test_a_kernel_that_was_never_tuned_is_chosen_by_the_coefficients(db):
    """They say that tiles of 128 keys take four times as long, so the predicted rule avoids them."""
    other = SPEC.replace(window=4096)
    before = selection.rule_for(other, LAYOUT, "cpu", db)
    harmful = before.variants[0].tile_kv
    fit = plain_fit(
        intercept=0.0, coefficients={"tile_kv": 3.0 if harmful >= 64 else -3.0}, ranges={"tile_kv": (4.0, 6.0, 9.0)}
    )
    store(db, fit.to_dict())
    after = selection.rule_for(other, LAYOUT, "cpu", db)
    assert "fitted to 54 trials" in after.reason and after.evidence["kind"] == "predicted"
    assert harmful not in {variant.tile_kv for variant in after.variants[:1]}


@needs_sklearn
def test_a_store_with_trials_gives_coefficients_and_one_without_none(db):
    assert fitting.of_store(db, CPU, "cpp") is None
    for one in made_trials(lambda predicted, variant, batch: 3.0 * predicted):
        db.record(one)
    fit = fitting.of_store(db, CPU, "cpp")
    assert fit is not None and slower(fit) == pytest.approx(3.0, rel=0.05)
    assert fitting.of_store(db, replace(CPU, bandwidth_gb_s=0.0), "cpp") is None
    assert len(recent_trials(db, CPU, "cpp", limit=10)) == 10
