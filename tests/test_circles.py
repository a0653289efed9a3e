"""No module of ``jobs`` reaches itself through its imports, those inside of functions among them."""

from pathlib import Path

from tests.test_architecture import ROOT, imports, module_of, sources

Reached = dict[str, set[str]]


def reached(root: Path, room: str) -> Reached:
    """Map each module of a room to those of the same room that its imports lead to."""
    own = {module_of(path): (path, tree) for path, tree in sources(root, f"src/kway/{room}")}
    near: Reached = {}
    for module, (path, tree) in own.items():
        names = (target.removeprefix("kway.") for _, target, _ in imports(path, tree))
        # What is imported may be a module, or a name out of one.
        near[module] = {found for name in names for found in (name, name.rpartition(".")[0]) if found in own}
    far = {module: set(others) for module, others in near.items()}
    for through, beyond in far.items():
        for others in far.values():
            if through in others:
                others.update(beyond)
    return far


def in_circles(found: Reached) -> list[str]:
    return sorted(module for module, others in found.items() if module in others)


def test_the_modules_of_jobs_stand_in_an_order() -> None:
    assert in_circles(reached(ROOT, "jobs")) == []


def test_a_circle_is_found_whichever_functions_hide_it(tmp_path: Path) -> None:
    folder = tmp_path / "src/kway/jobs"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from kway.jobs.b import f\n")
    (folder / "b.py").write_text("def f():\n    from kway.jobs import c\n")
    (folder / "c.py").write_text("def g():\n    import kway.jobs.a\n")
    (folder / "d.py").write_text("from kway.jobs.a import f\n")
    assert in_circles(reached(tmp_path, "jobs")) == ["jobs.a", "jobs.b", "jobs.c"]
