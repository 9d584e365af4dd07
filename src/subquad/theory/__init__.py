"""Theory: is this pattern a universal approximator? Checked, counted, constructed, measured.

from subquad.theory import check, prove, theorem1
print(check("strided:w=16", 256))
print(prove("star", 4, 1, "1/2"))
print(theorem1(prove("star", 4, 1, "1/2")).total)
"""

from subquad.theory.assumptions import Verdict, check
from subquad.theory.maps import MapVerdict, check_map
from subquad.theory.proof import Proof, prove
from subquad.theory.sets import Support, read
from subquad.theory.theorem import Theorem1, approximate, theorem1

__all__ = [
    "MapVerdict",
    "Proof",
    "Support",
    "Theorem1",
    "Verdict",
    "approximate",
    "check",
    "check_map",
    "prove",
    "read",
    "theorem1",
]
