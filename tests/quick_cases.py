"""How many cases every run tries of tests that take seconds; ``make prove`` and ``pytest -m slow`` try them all.

The seconds are those of one run on two cores.  Of cases that go the same way a few are as good as all; a test with none
here has a quicker one beside it that a mistake would have to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

CASES: Final = {
    "tests/calibration/one_call/test_plan.py::test_a_configuration": 1,
    "tests/cli/test_calibrate.py::test_records_that_say_nothing_are_refused": 4,
    "tests/runtime/adapters/test_own_lora.py::test_it_costs_what_pefts_costs": 1,
    "tests/runtime/adapters/test_peft_equality.py::test_adapted_models_have_the_bits_of_the_plain_loop": 1,
    "tests/runtime/checkpoints/test_checkpoints.py::test_any_model_resumes_under_another_plan": 1,
    "tests/runtime/checkpoints/test_checkpoints.py::test_transformers_loads_a_checkpoint": 1,
    "tests/runtime/checkpoints/test_offline.py::test_one_tensor_is_in_memory_at_a_time": 1,
    "tests/runtime/chunks/test_absent_parameters.py::test_a_read_of_what_is_not_there_is_an_error_and_harms_nothing": 3,
    "tests/runtime/commands/test_random_batches.py::test_a_model_with_weights_is_given_what_one_without_is_given": 1,
    "tests/runtime/commands/test_run_weights.py::test_it_is_what_transformers_loads": 1,
    "tests/runtime/distillation/test_autocast.py::test_blocks_learn_what_each_learns_alone": 1,
    "tests/runtime/distillation/test_distil.py::test_a_distillation_goes_on_from_its_checkpoint": 1,
    "tests/runtime/distillation/test_distil.py::test_the_peak_is_the_schedules_own": 3,
    "tests/runtime/distillation/test_meta_pairs.py::test_the_bits_are_those_of_models_that_were_loaded": 1,
    "tests/runtime/distillation/test_pairs.py::test_blocks_under_autocast_learn_what_each_learns_alone": 2,
    "tests/runtime/distillation/test_pairs.py::test_stitched_blocks_learn_what_each_learns_alone": 3,
    "tests/runtime/distillation/test_tracing.py::test_the_workload_of_a_family": 1,
    "tests/runtime/distillation/test_tracing.py::test_unlike_element_types_are_refused_where_kernels_refuse_them": 2,
    "tests/runtime/hooks/test_recomputation.py::test_recomputed_blocks_equal_the_plain_loop": 2,
    "tests/runtime/hooks/test_selective.py::test_every_mixture_equals_the_plain_loop_within_the_guarantee": 1,
    "tests/runtime/hooks/test_selective.py::test_phases_that_are_derived_are_those_of_a_run": 1,
    "tests/runtime/hooks/test_swapping.py::test_every_mixture_of_modes_equals_the_plain_loop": 2,
    "tests/runtime/integrations/test_sft.py::test_it_trains_as_the_trainer": 1,
    "tests/runtime/integrations/test_trainer.py::test_it_trains_as_the_trainer": 1,
    "tests/runtime/model/test_heads.py::test_what_is_named_is_traced": 2,
    "tests/runtime/model/test_strides.py::test_checkpoints_carry_over_between_plans": 2,
    "tests/runtime/model/test_strides.py::test_random_plans_equal_the_plain_loop": 1,
    "tests/runtime/optimizers/test_host_gradients.py::test_every_plan_equals_the_plain_loop_with_float32_sums": 1,
    "tests/runtime/optimizers/test_named.py::test_a_training_goes_on_under_another_plan": 2,
    "tests/runtime/optimizers/test_named.py::test_every_plan_equals_the_plain_loop_with_its_optimizer": 2,
    "tests/runtime/optimizers/test_named.py::test_memory_is_what_was_said": 3,
    "tests/runtime/osft/test_saved_factors.py::test_factors_made_of_files_are_those_of_the_loaded_model": 1,
    "tests/runtime/polynomials/test_families.py::test_a_batch_of_one_is_another_program": 1,
    "tests/runtime/polynomials/test_sized.py::test_a_drawn_model_with_groups_equals_its_trace": 0,
    "tests/runtime/quantized/test_quantizing.py::test_what_stays_on_the_meta_device_has_the_sizes_of_what_does_not": 1,
    "tests/runtime/quantized/test_training.py::test_a_training_resumes_under_another_plan": 1,
    "tests/runtime/quantized/test_training.py::test_random_plans_equal_the_plain_loop": 1,
    "tests/runtime/quantized/test_training.py::test_the_model_is_as_bitsandbytes_made_it_afterwards": 1,
    "tests/runtime/quantized/test_training.py::test_the_peak_is_the_account": 2,
    "tests/runtime/quantized/test_wrapped.py::test_a_weight_that_wraps_others_is_refused_and_the_plain_loop_goes_on": 2,
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
    "tests/runtime/ranks/test_sequences.py::test_training_is_that_of_one_rank": 0,
    "tests/runtime/ranks/test_shard_groups.py::test_a_wrong_variant_gives_other_weights": 1,
    "tests/runtime/ranks/test_shard_groups.py::test_the_peak_and_the_host_are_the_schedules_own": 0,
    "tests/runtime/ranks/test_stage_checkpoints.py::test_what_the_files_hold": 0,
    "tests/runtime/ranks/test_stage_evaluation.py::test_both_models_are_what_plain_copies_are": 1,
    "tests/runtime/ranks/test_tiles_of_ranks.py::test_tiles_train_as_the_whole_on_two_ranks": 0,
    "tests/runtime/ranks/test_uneven_batches.py::test_a_larger_batch_of_one_rank_ends_the_training_of_all": 0,
    "tests/runtime/ranks/test_uneven_batches.py::test_a_smaller_batch_of_one_rank_trains_as_under_ddp": 1,
    "tests/runtime/test_prove.py::test_one_rank_that_errs_is_a_failure_of_its_claims_alone": 2,
    "tests/runtime/tiles/test_loss_models.py::test_a_plan_with_tiles_trains_as_the_plain_loop_within_its_account": 2,
    "tests/runtime/tiles/test_mlp_plans.py::test_tiles_train_as_plain": 1,
    "tests/runtime/tiles/test_random_tiles.py::test_random_tiles_train_as_plain": 1,
    "tests/runtime/tracing/test_model_flops.py::test_frozen_weights_need_no_gradient": 1,
    "tests/runtime/tracing/test_model_inputs.py::test_the_trace_without_weights_is_the_real_one": 1,
    "tests/runtime/tracing/test_quadratic.py::test_sizes_are_those_by_hand_with_weights_and_without": 1,
    "tests/runtime/training/test_accounts.py::test_device_adam_holds_one_gradient_in_float32": 1,
    "tests/runtime/training/test_accounts.py::test_one_answer_for_all_mixtures_is_noticed": 1,
    "tests/runtime/training/test_accounts.py::test_the_peak_is_the_schedules_own": 6,
    "tests/runtime/training/test_accounts.py::test_what_sections_share_goes_with_the_last_that_needs_it": 1,
    "tests/runtime/training/test_cuda_ordering.py::test_chunks_that_the_host_steps_and_the_device_keeps_too": 1,
    "tests/runtime/training/test_cuda_ordering.py::test_whichever_stream_lags_the_bits_are_the_plain_loops": 2,
    "tests/runtime/training/test_disk.py::test_a_checkpoint_goes_on_under_a_plan_with_another_place": 1,
    "tests/runtime/training/test_disk.py::test_every_optimizer_steps_the_disk_as_it_steps_the_host": 1,
    "tests/runtime/training/test_disk.py::test_everything_on_the_disk_trains_as_the_plain_loop": 1,
    "tests/runtime/training/test_dispatch_modes.py::test_a_mode_of_ones_own_around_any_part_of_a_step": 1,
    "tests/runtime/training/test_evaluation.py::test_on_a_device_that_runs_behind": 2,
    "tests/runtime/training/test_families.py::test_a_family_from_trace_to_training": 1,
    "tests/runtime/training/test_host_stepped.py::test_all_chunks_stepped_on_the_host_train_as_the_plain_loop": 2,
    "tests/runtime/training/test_memory.py::test_a_limit_of_the_norm_takes_no_byte_of_the_device": 2,
    "tests/runtime/training/test_memory.py::test_plans_differ_in_what_they_need": 1,
    "tests/runtime/training/test_memory.py::test_without_concurrency_the_guarantee_is_what_happens": 2,
    "tests/runtime/training/test_meta_models.py::test_files_of_another_model_are_refused_before_anything_moves": 3,
    "tests/runtime/training/test_orthogonal.py::test_random_plans_equal_the_plain_loop": 1,
    "tests/runtime/training/test_orthogonal.py::test_what_lies_on_the_disk_is_projected_in_its_places": 1,
    "tests/runtime/training/test_outer_sections.py::test_evaluation_brings_what_parts_of_the_model_need": 1,
    "tests/runtime/training/test_outer_sections.py::test_they_train_as_the_plain_loop": 2,
    "tests/runtime/training/test_packed.py::test_random_plans_equal_the_plain_loop": 1,
    "tests/runtime/training/test_pairs.py::test_two_methods_train_as_the_plain_loop": 1,
    "tests/runtime/training/test_plan_changes.py::test_state_of_any_optimizer": 1,
    "tests/runtime/training/test_precision.py::test_schedulers_reach_every_piece_of_a_narrow_parameter": 1,
    "tests/runtime/training/test_row_lookups.py::test_rows_train_as_whole_tables_do": 1,
    "tests/runtime/training/test_row_lookups.py::test_the_peak_is_the_schedules_own": 1,
    "tests/runtime/training/test_same_operations.py::test_a_plan_runs_the_operations_of_the_plain_loop": 1,
    "tests/shared/verify/test_guaranteed_peak.py::test_some_timing_reaches_it_in_chains": 12,
    "tests/sim/searching/test_infeasible.py::test_the_changes_named_are_the_smallest": 0,
    "tests/sim/searching/test_row_lookups.py::test_the_search_finds_what_brute_force_finds": 1,
    "tests/sim/searching/test_search.py::test_the_result_does_not_depend_on_the_order_of_enumeration": 1,
    "tests/sim/test_recommendations.py::test_what_is_recommended_survives_and_is_worth_its_means": 1,
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
