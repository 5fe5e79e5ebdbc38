"""The functions that the listings of the survey call, over the parts that the engine runs."""

from foretoken.classic.survey.medusa import TOPK, generate_candidates, generate_medusa_buffers, tree_decoding
from foretoken.classic.survey.prompt_lookup import PromptLookupCandidateGenerator
from foretoken.classic.survey.rest import Datastore

__all__ = [
    "TOPK",
    "Datastore",
    "PromptLookupCandidateGenerator",
    "generate_candidates",
    "generate_medusa_buffers",
    "tree_decoding",
]
