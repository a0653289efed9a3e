"""A proof of bits as a certificate: what another run must reproduce, and what it may not be compared with."""

import json

import pytest

from kway.cli.main import main

PROVE = [
    "prove", "mlp", "--data", "synthetic", "--devices", "cpu:1", "--exactness", "bits", "--shards", "3",
    "--batch-size", "7", "--steps", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof") / "out"
    assert main([*PROVE, "--out", str(folder)]) == 0
    return json.loads((folder / "proof.json").read_text())


def against(proof, tmp_path, capsys):
    """Prove once more against ``proof``: (exit code, what the command said about it, the verdict's line)."""
    file = tmp_path / "other.json"
    file.write_text(json.dumps(proof))
    code = main([*PROVE, "--against", str(file), "--out", str(tmp_path / "again")])
    lines = capsys.readouterr().out.splitlines()
    saved = json.loads((tmp_path / "again" / "proof.json").read_text())
    said = next(line for line in lines if line.startswith("against "))
    assert saved["against"]["disagreement"] in (None, said.partition(": ")[2])
    assert saved["verdict"] == ("pass" if code == 0 else "fail")
    return code, said.partition(": ")[2]


def test_it_has_a_fingerprint_of_every_kind_for_every_step(written):
    steps = written["certificate"]["steps"]
    assert len(steps) == 3
    for step in steps:
        assert set(step) == {"loss", "gradient", "parameters", "buffers", "optimizer"}
        assert all(len(bytes.fromhex(value)) == 32 for value in step.values())
    assert len({step["parameters"] for step in steps}) == 3
    within = written["certificate"]["holds_within"]
    assert within["shards"] == 3
    assert within["threads_a_shard"] == 1


def test_the_same_machine_reproduces_it(written, tmp_path, capsys):
    assert against(written, tmp_path, capsys) == (0, "equal bits")


@pytest.mark.parametrize(("step", "kind"), [(1, "loss"), (2, "parameters"), (3, "optimizer")])
def test_other_bits_are_named(written, tmp_path, capsys, step, kind):
    tampered = json.loads(json.dumps(written))
    place = tampered["certificate"]["steps"][step - 1]
    place[kind] = ("0" if place[kind][0] != "0" else "1") + place[kind][1:]
    assert against(tampered, tmp_path, capsys) == (1, f"{kind} of step {step} differ")


@pytest.mark.parametrize(
    ("name", "value"), [("instruction_set", "AVX9"), ("torch", "1.0"), ("device", "abacus"), ("shards", 4)]
)
def test_another_kind_of_machine_is_called_that(written, tmp_path, capsys, name, value):
    other = json.loads(json.dumps(written))
    other["certificate"]["holds_within"][name] = value
    # Other bits come with another kind of machine, and are no news then.
    other["certificate"]["steps"][0]["loss"] = "0" * 64
    code, said = against(other, tmp_path, capsys)
    assert code == 1
    assert said.startswith(f"another kind of machine: {name} is ")
    assert repr(value) in said
    assert said.endswith("bits are not promised")


@pytest.mark.parametrize(("name", "value"), [("model", "lenet"), ("batch_size", 8), ("seed", 1)])
def test_another_job_is_called_that(written, tmp_path, capsys, name, value):
    other = json.loads(json.dumps(written))
    other["certificate"][name] = value
    code, said = against(other, tmp_path, capsys)
    assert (code, said.startswith(f"another job: {name} is ")) == (1, True)


def test_a_proof_of_another_level_is_no_certificate(tmp_path, capsys):
    words = ["prove", "mlp", "--data", "synthetic", "--devices", "cpu:1", "--batch-size", "7", "--steps", "1"]
    assert main([*words, "--out", str(tmp_path / "math")]) == 0
    code = main(
        [*PROVE, "--against", str(tmp_path / "math" / "proof.json"), "--out", str(tmp_path / "again")]
    )
    assert code == 2
    assert "holds no certificate" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.usefixtures("forks")
def test_it_holds_whatever_devices_were_asked_for(tmp_path):
    """A batch of 32 splits evenly over 1, 2 and 4 devices and not over 3: fingerprints must not follow that."""
    common = [
        "prove",
        "mlp",
        "--data",
        "synthetic",
        "--exactness",
        "bits",
        "--shards",
        "4",
        "--batch-size",
        "32",
    ]
    certificates = []
    for place, devices in enumerate(("cpu:1", "cpu:2", "cpu:1 cpu:3")):
        out = tmp_path / str(place)
        assert (
            main([*common, "--steps", "2", "--strategy", "data", "--devices", devices, "--out", str(out)])
            == 0
        )
        certificates.append(json.loads((out / "proof.json").read_text())["certificate"])
    assert certificates[0] == certificates[1] == certificates[2]
