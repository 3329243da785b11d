"""FX -> FX: one pass a file, nothing decided here.

`canonicalize` brings the joint graph into the shape that is planned for; `split` turns it and a
plan into forward and backward. `mark_static` notes in the graph what AOTAutograd tells beside it.
"""

from rematc.passes.canonicalize import canonicalize
from rematc.passes.gathered import mark_static
from rematc.passes.split import split

__all__ = ["canonicalize", "mark_static", "split"]
