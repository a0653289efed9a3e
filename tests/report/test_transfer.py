import io

from kway.report.transfer import Transfer

MIB = 2**20


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(live, seconds, total=100, width=100):
    """Show a download of ``total`` MiB, 1 MiB a second, a block each tenth of a second."""
    out, clock = io.StringIO(), Clock()
    view = Transfer(out, live=live, width=lambda: width, clock=clock)
    for tenth in range(1, seconds * 10 + 1):
        clock.now = tenth / 10
        view({"event": "bytes", "file": "a.tar.gz", "done": tenth * MIB // 10, "of": total * MIB})
    view.close()
    return out.getvalue()


def test_a_log_gets_a_line_each_half_minute():
    lines = shown(False, 100).splitlines()
    assert len(lines) == 5
    assert lines[0] == "a.tar.gz  100.0 MiB"
    assert lines[1] == "a.tar.gz  30 %  30.1 MiB of 100.0 MiB  1.05 MB/s  1 min 10 s left"
    assert lines[-1] == "a.tar.gz  100.0 MiB downloaded"
    assert "\r" not in shown(False, 100)


def test_a_terminal_has_one_line_that_is_redrawn_and_cleared():
    text = shown(True, 5)
    assert "\n" not in text
    assert text.endswith("\r")
    assert text.count("\r") > 20
    assert all(len(part) < 30 for part in shown(True, 5, width=30).split("\r"))


def test_what_comes_to_an_end_stays_on_the_terminal():
    assert shown(True, 100).endswith("a.tar.gz  100.0 MiB downloaded\n")


def test_a_notice_stands_on_a_line_of_its_own():
    out = io.StringIO()
    view = Transfer(out, live=True, width=lambda: 80, clock=lambda: 1.0)
    view({"event": "bytes", "file": "a", "done": 1, "of": 10})
    view({"event": "notice", "text": "tried again"})
    assert out.getvalue().endswith("\rnote       tried again\n")


def test_a_download_that_goes_on_counts_only_what_is_new_for_its_rate():
    out, clock = io.StringIO(), Clock()
    view = Transfer(out, live=False, clock=clock)
    view({"event": "bytes", "file": "a", "done": 90 * MIB, "of": 100 * MIB})
    clock.now = 40.0
    view({"event": "bytes", "file": "a", "done": 94 * MIB, "of": 100 * MIB})
    assert out.getvalue().splitlines()[1] == "a  94 %  94.0 MiB of 100.0 MiB  105 kB/s  1 min 00 s left"
