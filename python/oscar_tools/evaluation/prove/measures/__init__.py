"""What is asked of every cache: one file per measure. A new one is a new file and its line in :data:`MEASURES`."""

from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Material, Measure
from oscar_tools.evaluation.prove.measures.effects import Effects
from oscar_tools.evaluation.prove.measures.json_schema import JsonSchema
from oscar_tools.evaluation.prove.measures.recall import Recall
from oscar_tools.evaluation.prove.measures.retrieval import Retrieval
from oscar_tools.evaluation.prove.measures.session import Session
from oscar_tools.evaluation.prove.measures.tail_kl import TailKl
from oscar_tools.evaluation.prove.measures.tasks import Tasks

__all__ = ["MEASURES", "Answer", "Answers", "Effects", "Figures", "Material", "Measure"]

MEASURES: dict[str, type[Measure]] = {
    measure.name: measure for measure in (TailKl, Effects, Retrieval, Recall, Tasks, Session, JsonSchema)
}
"""Name on the command line -> measure, in the order in which they are asked. JSON comes last: should a server be unable
to serve a grammar, it has answered everything else."""
