from kway.devices.profiling import LEVEL, quiet


def test_the_profiler_is_quiet_unless_the_user_wants_it_otherwise():
    silent, loud = {}, {LEVEL: "0"}
    quiet(silent)
    quiet(loud)
    assert int(silent[LEVEL]) > 5, "it has no message of a higher level"
    assert loud == {LEVEL: "0"}
