"""How many cases every run tries of tests that take seconds; ``make prove`` and ``pytest -m slow`` try them all.

The seconds are those of one run on two cores.  Of cases that go the same way a few are as good as all; a test with none
here has a quicker one beside it that a mistake would have to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

CASES: Final = {
    "tests/runtime/adapters/test_own_lora.py::test_it_costs_what_pefts_costs": 1,
    "tests/runtime/adapters/test_peft_equality.py::test_adapted_models_have_the_bits_of_the_plain_loop": 2,
    "tests/runtime/hooks/test_selective.py::test_every_mixture_equals_the_plain_loop_within_the_guarantee": 1,
    "tests/runtime/integrations/test_trainer.py::test_it_trains_as_the_trainer": 2,
    "tests/runtime/polynomials/test_families.py::test_a_batch_of_one_is_another_program": 1,
    "tests/runtime/polynomials/test_sized.py::test_a_drawn_model_with_groups_equals_its_trace": 0,
    "tests/runtime/ranks/test_beside_ddp.py::test_a_wrong_variant_gives_other_weights": 1,
    "tests/runtime/ranks/test_beside_ddp.py::test_two_ranks_give_the_bits_of_ddp": 2,
    "tests/runtime/ranks/test_beside_ddp.py::test_two_ranks_project_the_means_of_their_gradients": 1,
    "tests/runtime/ranks/test_beside_ddp.py::test_two_ranks_project_what_lies_in_parts": 0,
    "tests/runtime/ranks/test_beside_ddp.py::test_two_ranks_share_a_packed_base": 1,
    "tests/runtime/ranks/test_checkpoints_of_ranks.py::test_a_wrong_variant_goes_on_otherwise": 1,
    "tests/runtime/ranks/test_checkpoints_of_ranks.py::test_ranks_go_on_as_ddp_that_nothing_interrupted": 1,
    "tests/runtime/ranks/test_deferred_ranks.py::test_whichever_stream_lags_two_ranks_give_the_bits_of_ddp": 1,
    "tests/runtime/ranks/test_deferred_ranks.py::test_with_one_wait_or_one_reference_less_something_else_comes_out": 1,
    "tests/runtime/ranks/test_distillation_stages.py::test_replicas_step_with_the_mean_of_their_gradients": 1,
    "tests/runtime/ranks/test_distillation_stages.py::test_stages_distil_what_each_block_learns_alone": 1,
    "tests/runtime/ranks/test_distillation_stages.py::test_wrong_activations_are_noticed": 1,
    "tests/runtime/ranks/test_ends.py::test_an_error_of_one_rank_ends_all": 2,
    "tests/runtime/ranks/test_failures.py::test_a_failure_anywhere_ends_all_with_its_words": 1,
    "tests/runtime/ranks/test_initial_values.py::test_training_is_that_of_models_which_were_equal_before": 1,
    "tests/runtime/ranks/test_losses.py::test_weighed_losses_are_those_of_all_tokens": 1,
    "tests/runtime/ranks/test_memory_of_ranks.py::test_one_step_is_that_of_the_mean": 1,
    "tests/runtime/ranks/test_orthogonal_shards.py::test_ranks_with_one_batch_get_what_one_rank_gets": 0,
    "tests/runtime/ranks/test_orthogonal_shards.py::test_the_peak_is_the_schedules_own": 0,
    "tests/runtime/ranks/test_peft_ranks.py::test_adapted_models_of_two_ranks_have_the_bits_of_ddp": 1,
    "tests/runtime/ranks/test_records.py::test_what_ranks_wait_for_the_slowest": 0,
    "tests/runtime/ranks/test_sequences.py::test_a_wrong_variant_is_noticed": 1,
    "tests/runtime/ranks/test_sequences.py::test_training_is_that_of_one_rank": 1,
    "tests/runtime/ranks/test_shard_groups.py::test_a_wrong_variant_gives_other_weights": 1,
    "tests/runtime/ranks/test_shard_groups.py::test_the_peak_and_the_host_are_the_schedules_own": 0,
    "tests/runtime/ranks/test_stage_checkpoints.py::test_what_the_files_hold": 0,
    "tests/runtime/ranks/test_stage_evaluation.py::test_both_models_are_what_plain_copies_are": 1,
    "tests/runtime/ranks/test_tiles_of_ranks.py::test_gradients_divided_by_tiles_are_seen_on_two_ranks": 1,
    "tests/runtime/ranks/test_tiles_of_ranks.py::test_tiles_train_as_the_whole_on_two_ranks": 0,
    "tests/runtime/ranks/test_uneven_batches.py::test_a_larger_batch_of_one_rank_ends_the_training_of_all": 1,
    "tests/runtime/ranks/test_uneven_batches.py::test_a_smaller_batch_of_one_rank_trains_as_under_ddp": 1,
    "tests/runtime/tiles/test_random_tiles.py::test_random_tiles_train_as_plain": 1,
    "tests/runtime/tracing/test_quadratic.py::test_sizes_are_those_by_hand_with_weights_and_without": 2,
    "tests/runtime/training/test_accounts.py::test_one_answer_for_all_mixtures_is_noticed": 1,
    "tests/runtime/training/test_families.py::test_a_family_from_trace_to_training": 1,
    "tests/runtime/training/test_outer_sections.py::test_they_train_as_the_plain_loop": 3,
    "tests/sim/searching/test_infeasible.py::test_the_changes_named_are_the_smallest": 0,
    "tests/sim/searching/test_search.py::test_the_result_does_not_depend_on_the_order_of_enumeration": 3,
    "tests/sim/test_recommendations.py::test_what_is_recommended_survives_and_is_worth_its_means": 2,
}
"""By test, without its parameters."""


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of ``CASES`` that not every run tries ``slow``.

    Cases that are slow already do not count.  Those that stay come from equal stretches, each at another place in it.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in CASES and item.get_closest_marker("slow") is None:
            cases.setdefault(test, []).append(item)
    for test, found in cases.items():
        kept, length = min(CASES[test], len(found)), len(found)
        places = {place * length // kept + (kept - 1 - place) % max(1, length // kept) for place in range(kept)}
        for place, item in enumerate(found):
            if place not in places:
                item.add_marker(pytest.mark.slow)
