"""Stable names for every leaf of any parameter tree, and Optax on all of it.

Two ways in. **Your own loop**: ``split`` a model into plain params and the rest, use
plain Optax, ``merge`` inside the loss. **Someone else's loop**: hand it rules and
selectors, which Optax takes wherever it takes labels and masks.

Ten names for most of it::

    split(tree, where)            params as a plain dict {path: array}, and the rest
    merge(params, rest)           the tree again
    Rules({pattern: label})       what every leaf gets; the first match wins
    glob(pattern)                 a selector, and a mask wherever Optax takes one
    summarize(tree, rules)        a report: paths, shapes, sizes, labels
    adapt(tx)                     any Optax transformation, on any tree
    partition(transforms, rules)  a transformation for each label
    freeze(tx, where)             leaves that no step changes
    save(path, tree)              a checkpoint, by label path
    load(path, target)            it again, in the classes of the target

All others, by task::

    trees        tree_paths to_flat_dict from_flat_dict to_state_dict from_state_dict
                 map_where register Adapter AdapterRegistry default_registry Flat BOX
                 Rest Tree Params
    choosing     leaf node escape load_rules param_labels param_mask FreezeSpec STATIC
                 Selector Decision Where RulesLike
    optimizers   apply_updates scale_by_rules lift inject_hyperparams schedule
                 per_layer load_optimizer tree_norms value_and_grad_from_state
                 incremental_update
    their state  carry_state CarryReport tree_get tree_set tree_map_params
                 set_opt_state schedule_free_eval_params
    checkpoints  compare_checkpoint LoadReport read_metadata load_torch_state
    migrations   Migration load_migration MigrationPlan draft_migration MigrationDraft
                 find_wrong_rows WrongRows match_models ModelMatch
    sharding     partition_specs named_shardings opt_state_shardings init_sharded
                 shard_largest
    viewing      tree_diff TreeDiff Difference Summary MemoryPlan
    errors       TreeAdaptError and its children, TreeAdaptWarning and its children
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

# Room -> its public names. ``__init__.pyi`` says the same to type checkers.
_NAMES_IN = {
    "_version": "__version__",
    "checkpoints.load_report": "LoadReport",
    "checkpoints.save_load": "compare_checkpoint load read_metadata save",
    "checkpoints.torch_state": "load_torch_state",
    "errors": (
        "AdapterError CheckpointError CollectionWarning FreezeError MigrationError "
        "NoArraysError OverlapError PathCollisionError PathError PatternError "
        "RandomStateWarning ReplicatedWarning RulesError RulesFileError SelectorError "
        "ShardingError StackError StructureMismatchError TiedLeafWarning "
        "TransformError TreeAdaptError TreeAdaptWarning TreeCycleError TreeDepthError "
        "UnliftedMaskWarning UnmatchedPathError UnstablePathWarning "
        "UnusedAlternativeWarning UnusedRuleError"
    ),
    "migrations.loading": "load_migration",
    "migrations.migration": "Migration",
    "migrations.plan": "MigrationPlan",
    "optimizers.load": "load_optimizer",
    "patterns.glob": "escape",
    "porting.drafts.draft": "draft_migration",
    "porting.drafts.migration_draft": "MigrationDraft",
    "porting.matching.match": "match_models",
    "porting.matching.model_match": "ModelMatch",
    "porting.wrong_rows.find": "WrongRows find_wrong_rows",
    "reports.diff": "Difference TreeDiff tree_diff",
    "reports.memory": "MemoryPlan",
    "reports.summary": "Summary summarize",
    "selection.decision": "STATIC Decision",
    "selection.freeze_spec": "FreezeSpec",
    "selection.largest_axis": "shard_largest",
    "selection.rules": "Rules RulesLike load_rules param_labels param_mask",
    "selection.selectors": "Selector Where glob leaf node",
    "selection.splitting": "Rest map_where merge split",
    "sharding.state": "init_sharded opt_state_shardings",
    "sharding.training_state": "named_shardings partition_specs",
    "state.callbacks": "tree_map_params value_and_grad_from_state",
    "state.carry_state": "CarryReport carry_state",
    "state.fields": "schedule_free_eval_params tree_get tree_set",
    "state.nnx_optimizer": "set_opt_state",
    "transforms.adapt": "adapt",
    "transforms.hyperparams": "inject_hyperparams schedule",
    "transforms.lift": "lift",
    "transforms.norms": "tree_norms",
    "transforms.partition": "freeze partition",
    "transforms.per_layer": "per_layer",
    "transforms.scale": "scale_by_rules",
    "transforms.updates": "apply_updates incremental_update",
    "trees.adapters.adapter": "BOX Adapter Flat",
    "trees.adapters.registry": "AdapterRegistry default_registry register",
    "trees.arrays": "Params Tree",
    "trees.state_dict": (
        "from_flat_dict from_state_dict to_flat_dict to_state_dict tree_paths"
    ),
}
_ROOM_OF = {name: room for room, names in _NAMES_IN.items() for name in names.split()}
__all__ = sorted(_ROOM_OF)
# What other libraries call it -> what it is called here.
_ELSEWHERE = {
    "chain": "optax.chain, inside adapt or partition",
    "combine": "merge",
    "filter": "split",
    "flatten flatten_dict": "to_flat_dict",
    "freeze_layers freeze_params frozen set_to_zero": (
        "freeze, or the label 'frozen' of partition"
    ),
    "convert convert_checkpoint migrate": "load(path, target, migration=table)",
    "from_pretrained load_checkpoint load_pretrained load_safetensors": "load",
    "load_file load_params load_pytorch load_state_dict load_weights restore": "load",
    "load_report": "compare_checkpoint",
    "get_labels labels make_labels": "param_labels",
    "mask": "param_mask",
    "masked": "freeze, or optax.masked(tx, treeadapt.glob(pattern)) inside adapt",
    "match_partition_rules": "partition_specs",
    "multi_transform": "partition",
    "rename": "Migration(table)(tree)",
    "save_checkpoint save_file save_params save_pretrained save_safetensors": "save",
    "tree_at tree_map tree_map_with_path path_aware_map": "map_where",
    "tree_flatten_with_path": "to_flat_dict",
    "unflatten unflatten_dict": "from_flat_dict",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room, the first time that it is asked for."""
    if name not in _ROOM_OF:
        hint = "" if name.startswith("_") else _meant(name)
        raise AttributeError(f"module 'treeadapt' has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(f"treeadapt.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def _meant(name: str) -> str:
    """Return a question that names ours, if there is one like it."""
    import difflib  # here, because only an error needs it

    ours = (new for old, new in _ELSEWHERE.items() if name in old.split())
    near = difflib.get_close_matches(name, __all__, 1)
    # The words of ``label_params`` are those of ``param_labels``.
    turned = (new for new in __all__ if _words(new) == _words(name))
    found = next(itertools.chain(ours, turned, near), "")
    return found and f". Did you mean {found}?"


def _words(name: str) -> list[str]:
    return sorted(word.lower().rstrip("s") for word in name.split("_"))


def __dir__() -> list[str]:
    return __all__
