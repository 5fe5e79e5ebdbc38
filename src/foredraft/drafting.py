"""The public interface for drafters in other packages: base classes, data types, and options of methods.

    from foredraft.drafting import ContextDrafter, DraftOptions, DraftSize, DraftTree, Method, Row, draft_length

All names in `foredraft.drafting` stay importable, even if the modules behind them change.
`foredraft.testing.check_drafter` tests a drafter in every setting; see docs/add_a_drafter.md.
"""

from __future__ import annotations

from foredraft.config.drafting import (
    BranchOptions,
    DraftOptions,
    ModelOptions,
    acceptance,
    branches,
    draft_length,
    draft_sampling,
    node_limit,
)
from foredraft.config.options import Kind, Options, anything, flag, number, one_of, option, path, whole, whole_numbers
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.growth import Expander, Growth
from foredraft.engine.drafter import (
    ContextDrafter,
    DraftCache,
    Drafter,
    DrafterFacts,
    DraftSize,
    Features,
    Needs,
    PromptChunk,
    StepResult,
    own_result,
)
from foredraft.engine.row import Row, RowState
from foredraft.methods import Method
from foredraft.methods.growth import GrowthOptions
from foredraft.tree import DraftTree

__all__ = [
    "BranchOptions",
    "ContextDrafter",
    "DraftCache",
    "DraftOptions",
    "DraftSize",
    "DraftTree",
    "Drafter",
    "DrafterContext",
    "DrafterFacts",
    "Expander",
    "Features",
    "Growth",
    "GrowthOptions",
    "Kind",
    "Method",
    "ModelOptions",
    "Needs",
    "Options",
    "PromptChunk",
    "Row",
    "RowState",
    "StepResult",
    "acceptance",
    "anything",
    "branches",
    "draft_length",
    "draft_sampling",
    "flag",
    "node_limit",
    "number",
    "one_of",
    "option",
    "own_result",
    "path",
    "whole",
    "whole_numbers",
]
