"""Theory: is this pattern a universal approximator? Checked, counted, constructed.

from subquad.theory import check, prove
print(check("strided:w=16", 256))
print(prove("star", 4, 1, "1/2"))
"""

from subquad.theory.assumptions import Verdict, check
from subquad.theory.maps import MapVerdict, check_map
from subquad.theory.proof import Proof, prove
from subquad.theory.sets import Support, read
from subquad.theory.soften import approximate

__all__ = ["MapVerdict", "Proof", "Support", "Verdict", "approximate", "check", "check_map", "prove", "read"]
