"""Plans of several ranks on random nodes, with the tables that the search's bounds read."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from protwin.shared.methods.bypass import BYPASS
from protwin.shared.schema.hardware import Hardware, Link, Node, Topology
from protwin.shared.schema.plan import ParallelMode
from protwin.sim.costs.contention import ContentionModel
from protwin.sim.costs.task_costs import CostModel
from tests.sim.bound_cases import Case, case
from tests.strategies.machines import hardware
from tests.strategies.pairs import cases_of_ranks
from tests.strategies.plans import parallel_workloads, shard_groups
from tests.strategies.sharings import shared_workloads

RANKS = 4


@st.composite
def nodes(draw: DrawFn) -> Hardware:
    """Any machine, with four devices that reach each other over links of their own or through the host."""
    box = draw(hardware())
    topology = draw(st.sampled_from((Topology.SWITCH, Topology.MESH, Topology.RING, Topology.HOST)))
    link = Link(name="between", latency_s=draw(st.floats(0, 1e-3)), bandwidth_bytes_per_s=draw(st.floats(1e6, 1e12)))
    node = Node(
        name="random node",
        num_devices=RANKS,
        sockets=draw(st.sampled_from(((4,), (2, 2)))),
        pcie_roots=draw(st.sampled_from(((2, 2), (1, 1, 1, 1)))),
        root_bandwidth_bytes_per_s=draw(st.none() | st.floats(1e6, 1e12)),
        topology=topology,
        device_link=None if topology is Topology.HOST else link,
        through_host_memory=draw(st.booleans()),
    )
    host = box.host.model_copy(update={"num_cores": max(RANKS, box.host.num_cores)})
    return box.model_copy(update={"node": node, "host": host})


@st.composite
def ranked_cases(draw: DrawFn) -> Case:
    """Plans of two to four ranks on such machines, with the tables that bounds read."""
    planned = draw(parallel_workloads(max_blocks=5, measured=None))
    num_ranks = draw(st.integers(2, RANKS))
    update: dict[str, object] = {
        "activation_modes": None,
        "n_selective": 0,
        "n_offload_input": 0,
        "num_ranks": num_ranks,
    }
    update["shard_ranks"] = None
    if planned.plan.parallel is ParallelMode.SHARDED:
        update["shard_ranks"] = draw(shard_groups(num_ranks))
    if planned.plan.activation_modes is not None:
        update |= {"n_swap": 0, "n_checkpoint": 0}
    chosen = planned.plan.model_copy(update=update)
    box = draw(nodes())
    use_measured = draw(st.booleans())
    own = CostModel.of(planned.workload.model_copy(update={"measured_on": box.name}), box, num_ranks=num_ranks)
    costs = CostModel(own.hardware, use_measured=use_measured, together=box).among(num_ranks, chosen.shard_ranks)
    contention = draw(
        st.sampled_from([ContentionModel.of(box, num_ranks=num_ranks), ContentionModel.none(num_ranks=num_ranks)])
    )
    return case(planned.workload, chosen, planned.layout, costs, contention)


@st.composite
def sharing_cases(draw: DrawFn) -> Case:
    """The same, of two to four ranks that share sequences, all of them or in pairs."""
    found = draw(ranked_cases())
    num_ranks = found.plan.num_ranks
    number = draw(st.sampled_from([of for of in range(2, num_ranks + 1) if num_ranks % of == 0]))
    model = draw(shared_workloads(found.workload, (number,))).shared_among(number)
    chosen = found.plan.model_copy(update={"sequence_ranks": number})
    return case(model, chosen, found.layout, found.costs, found.contention)


@st.composite
def staged_cases(draw: DrawFn) -> Case:
    """Plans of stages of pipelines and of data parallel distillations on such machines, as ``ranked_cases``."""
    planned = draw(cases_of_ranks(measured=None, most_ranks=RANKS))
    workload, plan, box = planned.workload, planned.plan, draw(nodes())
    here = workload.model_copy(update={"measured_on": box.name})
    costs = CostModel.of(here, box, num_ranks=plan.num_ranks).among(plan.num_ranks, plan.shard_ranks)
    num_ranks = plan.num_ranks * workload.num_stages
    contention = draw(
        st.sampled_from([ContentionModel.of(box, num_ranks=num_ranks), ContentionModel.none(num_ranks=num_ranks)])
    )
    return case(workload, plan, planned.layout, costs, contention, BYPASS.policies)
