from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.schedule import just_in_time
from rematc.simulate import judged
def solve(problem: Problem, options: SolveOptions = SolveOptions()) -> Plan:
    g=problem.graph
    fw=set(v for i in g.forward for v in g.ops[i].outputs)
    saved=tuple(sorted({v for b in g.backward_steps for v in g.ops[b].inputs if v in fw}))
    import os
    if os.environ.get("MODE")=="remat":
        pinned={v for i in g.forward if g.ops[i].pin for v in g.ops[i].outputs}
        need=g.ancestors([v for b in g.backward_steps for v in g.ops[b].inputs])
        saved=tuple(sorted({v for i in need|set(g.backward_steps) for v in g.ops[i].inputs if v in pinned}))
    return judged(problem, Plan(saved, just_in_time(g,saved), strategy="all"))
