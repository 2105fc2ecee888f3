# The public names, for type checkers; no program reads this file. ``__init__.py`` has
# the same names.

from treeadapt._version import __version__
from treeadapt.checkpoints.load_report import LoadReport
from treeadapt.checkpoints.save_load import (
    compare_checkpoint,
    load,
    read_metadata,
    save,
)
from treeadapt.checkpoints.torch_state import load_torch_state
from treeadapt.errors import (
    AdapterError,
    CheckpointError,
    CollectionWarning,
    FreezeError,
    MigrationError,
    NoArraysError,
    OverlapError,
    PathCollisionError,
    PathError,
    PatternError,
    RandomStateWarning,
    ReplicatedWarning,
    RulesError,
    RulesFileError,
    SelectorError,
    ShardingError,
    StackError,
    StructureMismatchError,
    TiedLeafWarning,
    TransformError,
    TreeAdaptError,
    TreeAdaptWarning,
    TreeCycleError,
    TreeDepthError,
    UnliftedMaskWarning,
    UnmatchedPathError,
    UnstablePathWarning,
    UnusedAlternativeWarning,
    UnusedRuleError,
)
from treeadapt.migrations.loading import load_migration
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.optimizers.load import load_optimizer
from treeadapt.patterns.glob import escape
from treeadapt.porting.drafts.draft import draft_migration
from treeadapt.porting.drafts.migration_draft import MigrationDraft
from treeadapt.porting.matching.match import match_models
from treeadapt.porting.matching.model_match import ModelMatch
from treeadapt.porting.wrong_rows.find import WrongRows, find_wrong_rows
from treeadapt.reports.diff import Difference, TreeDiff, tree_diff
from treeadapt.reports.memory import MemoryPlan
from treeadapt.reports.summary import Summary, summarize
from treeadapt.selection.decision import STATIC, Decision
from treeadapt.selection.freeze_spec import FreezeSpec
from treeadapt.selection.largest_axis import shard_largest
from treeadapt.selection.rules import (
    Rules,
    RulesLike,
    load_rules,
    param_labels,
    param_mask,
)
from treeadapt.selection.selectors import Selector, Where, glob, leaf, node
from treeadapt.selection.splitting import Rest, map_where, merge, split
from treeadapt.sharding.state import init_sharded, opt_state_shardings
from treeadapt.sharding.training_state import named_shardings, partition_specs
from treeadapt.state.callbacks import tree_map_params, value_and_grad_from_state
from treeadapt.state.carry_state import CarryReport, carry_state
from treeadapt.state.fields import schedule_free_eval_params, tree_get, tree_set
from treeadapt.state.nnx_optimizer import set_opt_state
from treeadapt.transforms.adapt import adapt
from treeadapt.transforms.hyperparams import inject_hyperparams, schedule
from treeadapt.transforms.lift import lift
from treeadapt.transforms.norms import tree_norms
from treeadapt.transforms.partition import freeze, partition
from treeadapt.transforms.per_layer import per_layer
from treeadapt.transforms.scale import scale_by_rules
from treeadapt.transforms.updates import apply_updates, incremental_update
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat
from treeadapt.trees.adapters.registry import (
    AdapterRegistry,
    default_registry,
    register,
)
from treeadapt.trees.arrays import Params, Tree
from treeadapt.trees.state_dict import (
    from_flat_dict,
    from_state_dict,
    to_flat_dict,
    to_state_dict,
    tree_paths,
)

__all__ = [
    "BOX",
    "STATIC",
    "Adapter",
    "AdapterError",
    "AdapterRegistry",
    "CarryReport",
    "CheckpointError",
    "CollectionWarning",
    "Decision",
    "Difference",
    "Flat",
    "FreezeError",
    "FreezeSpec",
    "LoadReport",
    "MemoryPlan",
    "Migration",
    "MigrationDraft",
    "MigrationError",
    "MigrationPlan",
    "ModelMatch",
    "NoArraysError",
    "OverlapError",
    "Params",
    "PathCollisionError",
    "PathError",
    "PatternError",
    "RandomStateWarning",
    "ReplicatedWarning",
    "Rest",
    "Rules",
    "RulesError",
    "RulesFileError",
    "RulesLike",
    "Selector",
    "SelectorError",
    "ShardingError",
    "StackError",
    "StructureMismatchError",
    "Summary",
    "TiedLeafWarning",
    "TransformError",
    "Tree",
    "TreeAdaptError",
    "TreeAdaptWarning",
    "TreeCycleError",
    "TreeDepthError",
    "TreeDiff",
    "UnliftedMaskWarning",
    "UnmatchedPathError",
    "UnstablePathWarning",
    "UnusedAlternativeWarning",
    "UnusedRuleError",
    "Where",
    "WrongRows",
    "__version__",
    "adapt",
    "apply_updates",
    "carry_state",
    "compare_checkpoint",
    "default_registry",
    "draft_migration",
    "escape",
    "find_wrong_rows",
    "freeze",
    "from_flat_dict",
    "from_state_dict",
    "glob",
    "incremental_update",
    "init_sharded",
    "inject_hyperparams",
    "leaf",
    "lift",
    "load",
    "load_migration",
    "load_optimizer",
    "load_rules",
    "load_torch_state",
    "map_where",
    "match_models",
    "merge",
    "named_shardings",
    "node",
    "opt_state_shardings",
    "param_labels",
    "param_mask",
    "partition",
    "partition_specs",
    "per_layer",
    "read_metadata",
    "register",
    "save",
    "scale_by_rules",
    "schedule",
    "schedule_free_eval_params",
    "set_opt_state",
    "shard_largest",
    "split",
    "summarize",
    "to_flat_dict",
    "to_state_dict",
    "tree_diff",
    "tree_get",
    "tree_map_params",
    "tree_norms",
    "tree_paths",
    "tree_set",
    "value_and_grad_from_state",
]
