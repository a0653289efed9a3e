"""What a text file was opened with as ``newline``, from wherever it stands, and where that stays."""

import io

import pytest

from kway.data.newlines import newline_of

TEXTS = [b"", b"\n", b"\r\n", b"a\r\nb\r\n", b"ab\ncd\n", b"\r\rx", b"x" * 20_000 + b"\r\n"]
READ = {
    "nothing": lambda file: None,
    "no character": lambda file: file.read(0),
    "a character": lambda file: file.read(1),
    "a line": lambda file: file.readline(),
    "lines": lambda file: [file.readline() for _ in range(3)],
    "all": lambda file: file.read(),
    "all by lines": lambda file: [*file],
    "more than there is": lambda file: file.read(100_000),
    "beyond the end": lambda file: (file.read(100_000), file.read(3)),
    "back": lambda file: (file.read(1), file.seek(0)),
    "end": lambda file: file.seek(0, 2),
    "end and beyond": lambda file: (file.seek(0, 2), file.read(1)),
    "to where it is": lambda file: (file.readline(), file.seek(file.tell())),
    "a line from there": lambda file: (file.readline(), file.seek(file.tell()), file.readline()),
}


@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"])
@pytest.mark.parametrize("read", READ)
def test_newline_is_found_wherever_a_file_stands(newline, read, tmp_path):
    for number, text in enumerate(TEXTS):
        path = tmp_path / str(number)
        path.write_bytes(text)
        with path.open(newline=newline) as file, path.open(newline=newline) as same:
            READ[read](file)
            READ[read](same)
            assert newline_of(file) == newline
            assert file.tell() == same.tell()
            assert file.read() == same.read()


def test_what_is_read_by_lines_at_this_moment_does_not_tell(tmp_path):
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    with path.open() as file:
        next(file)
        with pytest.raises(OSError, match="disabled"):
            newline_of(file)
        assert [*file] == ["2\n", "3\n"]


def test_a_file_that_ends_between_the_halves_of_an_end_of_line_does_not_tell(tmp_path):
    path = tmp_path / "half"
    path.write_bytes(b"\r")
    with path.open() as file:
        assert file.read(1) == "\n"
        with pytest.raises(ValueError, match="cannot be found out"):
            newline_of(file)
        assert file.read() == ""


def test_an_object_of_another_form_does_not_tell():
    class Other(io.TextIOWrapper):
        """Says that its encoding is another one than it holds."""

        encoding = "none"

    with pytest.raises(ValueError, match="cannot be found out"):
        newline_of(Other(io.BytesIO(), "utf-8"))
