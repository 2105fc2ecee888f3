"""Each mechanism of drafts is needed: without it a test of drafts fails.

A mechanism that no test needs may break unseen, and may be dead. A row is where it is,
what is in its place, and a test that then fails: the fastest that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
import test_draft_law as law
import test_drafted_marks as marked
import test_drafts as drafts
import test_drafts_by_names as by_names
import test_drafts_of_chains as chains
import test_drafts_stated as stated
import test_drafts_that_may_not_hold as may_not_hold

import treeadapt as ta

DRAFTS = "treeadapt.porting.drafts"
FOLDER = object()  # in the place of a temporary one


def nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def unchanged(first: Any, *_: Any) -> Any:
    return first


class Mechanism(NamedTuple):
    """What is switched off, and what needs it; a test may take a folder at last."""

    place: str
    instead: Any
    test: Callable[..., None]
    arguments: tuple[Any, ...] = ()


MECHANISMS = [
    # Families of leaves, and their pairs, by names and shapes.
    Mechanism(
        "pairing.fusions",
        lambda ones, twos, words: (ones, twos, []),
        drafts.test_parts_may_be_within_each_head,
        ("hpd", False, "float32"),
    ),
    Mechanism(
        "families._slices",
        nothing,
        by_names.test_a_list_of_words_is_never_the_number_of_the_other_path,
    ),
    Mechanism(
        "families._joined",
        lambda side, *_: [*side],
        by_names.test_names_and_shapes_give_the_table,
        ("gates of an LSTM", False),
    ),
    Mechanism(
        "families._of_one_letter",
        lambda texts: [[*texts]],
        by_names.test_names_and_shapes_give_the_table,
        ("gates as wide as the input", False),
    ),
    Mechanism(
        "families._in_blocks",
        nothing,
        drafts.test_each_example_is_drafted_from_names_and_shapes,
        (FOLDER,),
    ),
    Mechanism(
        "families.siblings_of",
        lambda side: {},
        drafts.test_siblings_with_other_numbers_are_paired_by_rank,
        ("three alike", False),
    ),
    Mechanism(
        "pairing._alike",
        lambda ones, twos: [(a, b) for a, _ in ones for b, _ in twos],
        by_names.test_names_and_shapes_give_the_table,
        ("stages are an axis", False),
    ),
    Mechanism(
        "pairing._has_lists",
        lambda *_: True,
        by_names.test_a_list_of_words_is_an_axis_where_layers_have_nearer_names,
    ),
    Mechanism(
        "pairing._Assignment._of_modules",
        lambda self, scores, words: dict(scores),
        by_names.test_leaves_of_published_models_are_paired_as_those_next_to_them,
        ("keras-hub/vit", True),
    ),
    Mechanism(
        "pairing._Assignment._votes",
        lambda self, by_values, names: dict.fromkeys(names, 0.0),
        by_names.test_leaves_of_published_models_are_paired_as_those_next_to_them,
        ("maxtext/deepseek_v3", False),
    ),
    Mechanism(
        "pairing._of_other_length",
        nothing,
        by_names.test_a_vocabulary_that_is_longer_by_zeros_is_paired_by_names,
        (False,),
    ),
    Mechanism(
        "finding.with_tied_head",
        unchanged,
        stated.test_a_tied_head_is_filled_with_the_embedding,
        (True, True, FOLDER),
    ),
    Mechanism(
        "shapes.Sisters.likeliest",
        lambda self, orders, *_: orders[0],
        drafts.test_matrices_are_turned_as_those_that_shapes_decide,
        (False, False),
    ),
    Mechanism(
        "finding._may_be_scaled",
        lambda row: False,
        law.test_numbers_that_scales_multiply_are_marked,
        ("qwen3-fp8", False),
    ),
    Mechanism(
        "finding._equal",
        nothing,
        drafts.test_a_refactored_model_has_a_row_for_what_moved_and_one_for_the_rest,
        (False,),
    ),
    # What numbers show.
    Mechanism(
        "evidence.Evidence._shifted",
        nothing,
        drafts.test_a_function_may_add_1_and_cast,
        (jnp.bfloat16, "float64"),
    ),
    Mechanism(
        "evidence.Evidence._cropped",
        nothing,
        drafts.test_what_a_function_computes_is_in_the_row,
        ("zeros",),
    ),
    Mechanism(
        "evidence.Evidence._scaled",
        nothing,
        drafts.test_what_a_function_computes_is_in_the_row,
        ("a factor",),
    ),
    Mechanism(
        "evidence.exact_factor",
        unchanged,
        drafts.test_a_factor_has_all_digits_that_its_products_need,
    ),
    Mechanism(
        "factors._powers",
        nothing,
        drafts.test_a_root_that_was_rounded_is_marked_and_named,
        (22, "float16"),
    ),
    Mechanism(
        "evidence.Evidence.with_rivals",
        lambda self, rows: iter(rows),
        drafts.test_leaves_that_a_cast_makes_equal_are_marked,
    ),
    Mechanism(
        "evidence.is_symmetric",
        lambda array: False,
        drafts.test_a_symmetric_array_does_not_show_the_order_of_its_axes,
    ),
    Mechanism(
        "evidence._with_twins",
        unchanged,
        drafts.test_equal_arrays_of_the_source_are_marked,
    ),
    Mechanism(
        "evidence.Evidence.are_reordered",
        lambda *_: False,
        drafts.test_numbers_in_another_order_are_not_left_to_names,
        (70, jnp.bfloat16),
    ),
    Mechanism(
        "evidence.is_telling",
        lambda array: True,
        law.test_few_bits_that_are_equal_by_chance_are_left_to_names,
    ),
    Mechanism(
        "numbers.is_beyond_chance",
        lambda array: True,
        law.test_few_bits_that_are_equal_by_chance_are_left_to_names,
    ),
    Mechanism(
        "values._rows_with_a_name",
        lambda *_, **__: None,
        drafts.test_parts_may_differ_in_a_number_and_in_size,
        ("the parts of a stack", False),
    ),
    Mechanism(
        "values._rows_of_segments",
        nothing,
        drafts.test_parts_of_each_head_may_be_segments_of_another_array,
        ("qkvz", False),
    ),
    Mechanism(
        "evidence._of_one_word",
        nothing,
        drafts.test_words_may_be_places_in_blocks_of_layers_that_are_scaled,
    ),
    Mechanism(
        "values._rows_of_words",
        nothing,
        drafts.test_words_may_be_places_in_blocks_of_layers_that_are_scaled,
    ),
    Mechanism(
        "values._rows_in_blocks",
        nothing,
        drafts.test_some_layers_of_a_block_have_a_row_with_their_place_in_it,
        (False,),
    ),
    Mechanism(
        "evidence.Evidence.counted",
        nothing,
        drafts.test_arrays_whose_names_are_only_numbers_have_the_rows_that_numbers_prove,
        (False,),
    ),
    Mechanism(
        "evidence.Evidence._within",
        nothing,
        law.test_the_weights_of_a_sampler_are_drafted_from_values,
        ("bfloat16",),
    ),
    Mechanism(
        "finding._of_other_sizes",
        nothing,
        law.test_the_weights_of_a_sampler_are_drafted_from_values,
        ("bfloat16",),
    ),
    Mechanism(
        "inputs._without_streams",
        dict,
        drafts.test_random_streams_are_no_leaves_of_a_draft,
    ),
    Mechanism(
        "finding.with_blank_parts",
        lambda *_: None,
        chains.test_a_part_that_is_zeros_or_scaled_takes_a_table,
        ("zeros in the middle", FOLDER),
    ),
    Mechanism(
        "finding.with_scaled_parts",
        nothing,
        chains.test_a_part_that_is_zeros_or_scaled_takes_a_table,
        ("another factor", FOLDER),
    ),
    Mechanism(
        "draft.with_more_layers",
        unchanged,
        may_not_hold.test_what_more_layers_contradict_is_marked,
        (2,),
    ),
    # The table.
    Mechanism(
        "finishing.merged",
        lambda rows: [*rows],
        drafts.test_a_conversion_function_becomes_a_table,
    ),
    Mechanism(
        "ordering._narrowed",
        lambda *_: None,
        drafts.test_a_number_that_would_match_too_much_becomes_a_list,
    ),
    Mechanism(
        "finishing.rows_apart",
        unchanged,
        drafts.test_no_row_takes_a_leaf_without_a_partner,
    ),
    Mechanism(
        "finishing._bare",
        unchanged,
        drafts.test_words_that_nothing_else_has_in_their_place_are_not_listed,
    ),
    Mechanism(
        "finishing._size_notes",
        nothing,
        drafts.test_the_only_layer_of_a_model_is_warned_of,
        (True,),
    ),
    Mechanism(
        "finishing._collapsed",
        unchanged,
        drafts.test_a_refactored_model_has_a_row_for_what_moved_and_one_for_the_rest,
        (True,),
    ),
    Mechanism(
        "finishing._with_doubts",
        unchanged,
        stated.test_a_draft_for_other_heads_than_those_of_the_weights_is_marked,
        (FOLDER,),
    ),
    Mechanism(
        "finishing._constants",
        lambda *_: {},
        drafts.test_what_a_function_makes_of_no_leaf_is_filled,
        (0,),
    ),
    Mechanism(
        "finishing._sharing",
        lambda *_: {},
        law.test_copies_in_the_source_are_told_to_be_drafted_the_other_way,
    ),
    Mechanism(
        "finishing.with_single_numbers",
        lambda rows, inner: ([*rows], ""),
        marked.test_numbers_of_layers_that_were_seen_are_marked,
        (marked.but_the_last, 4, "layers.3.up.w"),
    ),
    Mechanism(
        "finishing.with_first_layers",
        lambda rows, sizes, _: ([*rows], sizes),
        drafts.test_numbers_after_those_of_another_row_begin_at_a_size,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.place)
def test_a_test_fails_without_a_mechanism_of_drafts(mechanism, monkeypatch, tmp_path):
    arguments = [tmp_path if each is FOLDER else each for each in mechanism.arguments]
    monkeypatch.setattr(f"{DRAFTS}.{mechanism.place}", mechanism.instead)
    with pytest.raises((AssertionError, TypeError, ta.MigrationError)):
        mechanism.test(*arguments)
