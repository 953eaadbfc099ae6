"""Trials of samples kill runs of both kinds: steps under the interceptor's mode, and without it."""

from __future__ import annotations

import kill_trials

from nugnn import cli
from nugnn.comm.groups import Ranks
from nugnn.datasets.samples import load_samples
from nugnn.known_rows import KnownRows
from nugnn.sample_config import SampleConfig
from nugnn.sample_run import build_model
from nugnn.samples import intercept_samples


def test_one_subject_of_samples_runs_without_the_mode_and_one_with_it() -> None:
    data, ranks = load_samples("digits-images"), Ranks(rank=0, world_size=3)
    for subject, is_known in ((kill_trials.WITH_NORM, False), (kill_trials.WITHOUT_MODE, True)):
        options = zip(subject.model[::2], subject.model[1::2], strict=True)
        config = cli.gather_settings({flag[2:].replace("-", "_"): value for flag, value in options}, {})
        assert isinstance(config, SampleConfig) and float(config.dropout or 0) > 0
        model = build_model(config, data)
        known = KnownRows(model, intercept_samples(model, ranks), ranks, batch_norm=config.batch_norm)
        assert bool(known._layout) == is_known


def test_each_subject_is_killed_with_each_aim_by_a_worker_and_by_the_launching_process() -> None:
    for num_subjects in (1, 2):
        turns = [kill_trials.turn_of(trial, num_subjects) for trial in range(1, 1 + 4 * num_subjects)]
        assert len({(subject, aim % 4) for subject, aim in turns}) == 4 * num_subjects
        killed_launcher = {kill_trials.turn_of(trial, num_subjects)[0] for trial in range(5, 11, 5)}
        assert len(killed_launcher) == num_subjects
