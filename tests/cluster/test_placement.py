"""Which roles share devices, for the layouts that users ask for."""

from __future__ import annotations

import pytest

from openrlhf.cluster.placement import (
    Group,
    PlacementError,
    PlacementPlan,
    Role,
    check_fits,
    order_devices,
    plan_placement,
    roles_of,
)
from openrlhf.config import PPOConfig


def config(**flags: object) -> PPOConfig:
    values: dict[str, object] = {
        "actor_num_gpus_per_node": 4,
        "critic_num_gpus_per_node": 4,
        "ref_num_gpus_per_node": 4,
        "reward_num_gpus_per_node": 4,
        "vllm_num_engines": 2,
        "vllm_tensor_parallel_size": 2,
        "advantage_estimator": "gae",
        "reward_pretrain": "some/reward",
    }
    return PPOConfig(**(values | flags))


def test_hybrid_engine_puts_everything_on_the_actors_gpus() -> None:
    plan = plan_placement(config(colocate_all_models=True), "GPU")
    assert [group.name for group in plan.groups] == ["actor+ref+critic+reward+engine"]
    (group,) = plan.groups
    assert plan.devices == group.devices == 4
    assert group.share == 0.2
    assert list(group.devices_of("engine", 1)) == [2, 3]
    assert list(group.devices_of("actor", 3)) == [3]
    assert plan.process_resources(group) == {"GPU": 0.2, "CPU": 0.2}


def test_async_keeps_the_engines_apart() -> None:
    plan = plan_placement(config(colocate_all_models=True, async_train=True), "GPU")
    assert [group.name for group in plan.groups] == ["actor+ref+critic+reward", "engine"]
    assert plan.devices == 8


def test_pairs_share_and_engines_have_their_own() -> None:
    plan = plan_placement(config(colocate_actor_ref=True, colocate_critic_reward=True), "GPU")
    assert [group.name for group in plan.groups] == ["actor+ref", "critic+reward", "engine"]
    assert [group.share for group in plan.groups] == [0.5, 0.5, 1.0]


def test_nothing_shared() -> None:
    plan = plan_placement(config(), "GPU")
    assert [group.name for group in plan.groups] == ["actor", "ref", "critic", "reward", "engine"]
    assert plan.devices == 20


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        ({"init_kl_coef": 0.0}, "ref"),
        ({"advantage_estimator": "rloo"}, "critic"),
        ({"reward_pretrain": None}, "reward"),
    ],
)
def test_roles_that_are_not_needed_are_not_placed(flags: dict[str, object], absent: str) -> None:
    assert absent not in roles_of(config(**flags))
    assert absent not in plan_placement(config(colocate_critic_reward=True, **flags), "GPU").role_names


def test_half_a_run_has_half_of_the_roles() -> None:
    assert plan_placement(config(colocate_all_models=True, rollout_only=True), "GPU").role_names == ["engine"]
    roles = plan_placement(config(colocate_all_models=True, load_rollouts="dump"), "GPU").role_names
    assert "actor" in roles and "engine" not in roles


def test_shares_of_three_fit_into_one_device() -> None:
    plan = plan_placement(config(colocate_all_models=True, advantage_estimator="rloo", reward_pretrain=None), "GPU")
    (group,) = plan.groups
    assert len(group.roles) == 3
    assert group.share == 0.33


def test_unknown_role_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="critic"):
        plan_placement(config(), "GPU").group_of("judge")


def test_a_plan_that_fits() -> None:
    check_fits(plan_placement(config(colocate_all_models=True), "GPU"), [{"GPU": 4.0, "CPU": 32.0}])
    small = config(
        actor_num_gpus_per_node=2, vllm_tensor_parallel_size=1, init_kl_coef=0.0, advantage_estimator="rloo",
        reward_pretrain=None,
    )  # fmt: skip
    check_fits(plan_placement(small, "CPU"), [{"CPU": 2.0}])


def test_too_few_devices_says_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(PlacementError) as error:
        check_fits(plan_placement(config(), "GPU"), [{"GPU": 8.0, "CPU": 64.0}, {"GPU": 4.0, "CPU": 64.0}])
    text = str(error.value)
    assert "needs 20 devices in all and the cluster has 12" in text
    assert "engine 2x2" in text and "node 1: GPU 4, CPU 64 = 4 devices" in text
    assert "--colocate_all_models" in text


def test_cores_limit_gpu_bundles_too() -> None:
    with pytest.raises(PlacementError, match="the cluster has 2"):
        check_fits(plan_placement(config(colocate_all_models=True), "GPU"), [{"GPU": 8.0, "CPU": 2.0}])


def test_an_engine_does_not_stretch_over_nodes() -> None:
    wide = config(
        colocate_all_models=True, actor_num_gpus_per_node=2, actor_num_nodes=2, critic_num_gpus_per_node=2,
        critic_num_nodes=2, ref_num_gpus_per_node=2, ref_num_nodes=2, reward_num_gpus_per_node=2, reward_num_nodes=2,
        vllm_num_engines=1, vllm_tensor_parallel_size=4,
    )  # fmt: skip
    with pytest.raises(
        PlacementError, match="one engine process needs 4 devices of one node and the largest node has 2"
    ):
        check_fits(plan_placement(wide, "GPU"), [{"GPU": 2.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 8.0}])


def engines(count: int, size: int) -> PlacementPlan:
    return PlacementPlan((Group((Role("engine", count, size),)),), "GPU")


def test_nodes_are_counted_in_whole_engines() -> None:
    node = {"GPU": 3.0, "CPU": 8.0}
    check_fits(engines(2, 2), [node, node])
    # one node that is large enough suffices, up to the last device
    check_fits(engines(1, 4), [{"GPU": size, "CPU": 8.0} for size in (2.0, 4.0)])
    with pytest.raises(
        PlacementError, match=r"each of 3 engine processes needs 2 devices of one node.*room for 2"
    ) as e:
        check_fits(engines(3, 2), [node, node])
    assert "RAY_ADDRESS names the cluster" in str(e.value), "a run on two nodes that found none began its own"
    # of 4 + 2 devices two engines leave 2 to the models, of 3 + 3 as well
    mixed = PlacementPlan((*engines(2, 2).groups, Group((Role("actor", 2),))), "GPU")
    for sizes in ((4, 2), (3, 3)):
        check_fits(mixed, [{"GPU": float(size), "CPU": 8.0} for size in sizes])


def test_a_bundle_has_the_devices_of_the_widest_process() -> None:
    (group,) = plan_placement(config(colocate_all_models=True), "GPU").groups
    assert (group.bundle_devices, group.bundles) == (2, 2)
    plan = plan_placement(config(), "CPU")
    sizes = {g.name: (g.bundles, plan.bundle_resources(g)) for g in plan.groups}
    assert sizes["engine"] == (2, {"CPU": 0.5})
    assert sizes["actor"] == (4, {"CPU": 0.25})


def test_the_devices_of_a_process_are_of_one_node() -> None:
    """Ranks and engines that share them take them in one order."""
    found = [("b", ("7", "2")), ("a", ("1", "0")), ("b", ("0", "10"))]
    devices = order_devices(found, 2)
    assert devices == [
        (1, "a", ("0",)), (1, "a", ("1",)), (2, "b", ("0",)), (2, "b", ("10",)), (0, "b", ("2",)), (0, "b", ("7",)),
    ]  # fmt: skip
    group = Group((Role("actor", 6), Role("engine", 3, 2)))
    for engine in range(3):
        taken = [devices[i] for i in group.devices_of("engine", engine)]
        assert len({(bundle, node) for bundle, node, _ in taken}) == 1
        assert taken == [devices[group.devices_of("actor", rank)[0]] for rank in (2 * engine, 2 * engine + 1)]


def test_devices_without_numbers() -> None:
    assert order_devices([("b", ()), ("a", ())], 2) == [(1, "a", ()), (1, "a", ()), (0, "b", ()), (0, "b", ())]
    assert order_devices([("a", ("3",)), ("a", ("1",))], 1) == [(1, "a", ("1",)), (0, "a", ("3",))]


def test_devices_are_in_the_order_of_their_numbers() -> None:
    assert order_devices([("a", ("10", "9"))], 2) == [(0, "a", ("9",)), (0, "a", ("10",))]


def test_a_plan_is_described_by_groups() -> None:
    plan = plan_placement(config(colocate_actor_ref=True), "GPU")
    assert plan.describe().splitlines() == [
        "  4 x GPU: actor 4, ref 4",
        "  4 x GPU: critic 4",
        "  4 x GPU: reward 4",
        "  4 x GPU: engine 2x2",
    ]
    assert plan.title == f"{plan.devices} devices"
    on_cpus = plan_placement(config(), "CPU")
    assert on_cpus.describe().startswith("  4 x CPU share (0.25 core): actor 4\n")
    assert on_cpus.title == "20 devices; Ray has found no GPU, all run on CPUs"


def test_no_nodes_at_all() -> None:
    with pytest.raises(PlacementError, match="no nodes"):
        check_fits(plan_placement(config(), "GPU"), [])
