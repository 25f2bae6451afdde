"""The planning stages in slow, plain Python: the specification.

The native and tensor versions must equal it bit by bit. Lists of Python integers only, so nothing
can overflow and nothing is hidden in a tensor operation. Where nothing else is said, ties go to the
lowest index.

Stage 2, the quota planner, has the steps of `csrc/include/megatron_ext/planner/`, which describes
them. What a file there keeps up to date as it goes along, such as the list of hosts, is computed
here when it is needed; but work is counted the same, as it decides when a try is given up.

    domain.py       a domain, the state of a try, and the moves that change it
    chain.py        assignments that move over several ranks
    shed.py         overloaded ranks relieved one by one
    refill.py       hosts filled one by one
    published.py    two published planners
    hand_over.py    busy senders spared
    attempt.py      one try for one threshold
    bound.py        what no plan can beat
    search.py       the threshold, and the plan that is taken
    paper.py        UltraEP's Algorithm 1 as published, and as its authors ship it
    reroute.py      stage 3

Legend: R ranks, E logical experts, M = E / R mains per rank, S slots per rank, N local tokens;
`load[r][e]` assignments from rank r to expert e, `quota[e][t]` assignments of expert e computed on
rank t. In the files of the quota planner, D is the number of ranks of an NVLink domain, and ranks
and experts are counted from the domain's first.
"""

from tests.reference.bound import lower_bound
from tests.reference.paper import solve_paper, solve_shipped
from tests.reference.reroute import assign, split_quota
from tests.reference.search import solve_quota

__all__ = ["assign", "lower_bound", "solve_paper", "solve_quota", "solve_shipped", "split_quota"]
