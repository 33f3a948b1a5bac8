"""The text of the bundled demo model: three parts of the standard library, split by topic.

A model, the text that calibrates its quantization and the text that judges it must not share
their subjects; otherwise the judgement measures memory. The split is therefore made by topic, and
the tables below and in `quantforge.api.demo_text` are the whole of it: a family of modules belongs
to exactly one part. Modules that they do not name are not used, which keeps out everything that a
distribution may leave
out of a minimal installation (`test`, `tkinter`, `idlelib`, `distutils`, ...) and every table of
numbers that is Python only by its suffix.

The text is read from the running Python and is never stored with the project: it belongs to the
Python Software Foundation. What is stored is its digest.

    python scripts/demo_text.py --out DIR      # writes DIR/calibration.txt and DIR/evaluation.txt
"""

import argparse
import hashlib
import sys
from pathlib import Path

from quantforge.api.demo_text import EVALUATION, Document, documents, evaluation_text, joined

__all__ = [
    "CALIBRATION",
    "EVALUATION",
    "TRAINING",
    "calibration_text",
    "evaluation_text",
    "training_text",
]

# Names of top-level modules or packages. Names that this version of Python lacks are skipped.
TRAINING: dict[str, str] = {
    "language": """abc _collections_abc _py_abc _weakrefset weakref types typing functools
        operator contextlib enum dataclasses copy copyreg reprlib keyword token tokenize ast
        symtable inspect dis opcode code codeop warnings traceback linecache annotationlib
        collections""",
    "importing": """importlib pkgutil runpy modulefinder zipimport site sysconfig compileall
        py_compile""",
    "testing and debugging": """unittest doctest pdb bdb trace tracemalloc timeit cProfile profile
        pstats pydoc pyclbr rlcompleter tabnanny cmd""",
    "concurrency": """asyncio concurrent multiprocessing threading _threading_local queue sched
        subprocess selectors socket socketserver signal asyncore asynchat""",
    "network": """email http urllib xmlrpc ftplib imaplib poplib smtplib smtpd nntplib telnetlib ssl
        ipaddress mailbox mailcap mimetypes wsgiref webbrowser cgi cgitb base64 quopri uu uuid""",
    "markup": "xml html _markupbase",
    "operating system": """os posixpath ntpath genericpath pathlib glob fnmatch shutil tempfile stat
        platform getpass fileinput filecmp io _pyio locale gettext codecs""",
    "text": "string re difflib textwrap pprint shlex optparse getopt argparse",
    "dates": "datetime _pydatetime _strptime calendar zoneinfo",
    "exact arithmetic and structures": """decimal _pydecimal bisect heapq colorsys hashlib hmac
        secrets graphlib struct""",
    "sound and pictures": "aifc wave chunk sunau sndhdr imghdr",
    "objects on disk": "pickle pickletools _compat_pickle shelve dbm sqlite3 ctypes",
}
CALIBRATION: dict[str, str] = {
    "logging": "logging",
    "configuration and records": "configparser tomllib plistlib netrc csv",
}


def training_documents() -> list[Document]:
    """Return the training part: source code, without the documentation pages."""
    return list(documents(TRAINING))


def training_pages() -> list[Document]:
    """Return the language reference as pydoc carries it, each paragraph once.

    pydoc's pages contain one another (a page on classes holds the page on each special method),
    so a paragraph that an earlier page showed is dropped.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    pages = []
    for name in sorted(topics):
        fresh = [part for part in topics[name].split("\n\n") if part.strip() and part not in seen]
        seen.update(fresh)
        if fresh:
            pages.append(Document(name, "\n\n".join(fresh).strip() + "\n"))
    return pages


def calibration_text() -> str:
    """Return the text that quantization may look at."""
    return joined(documents(CALIBRATION))


def training_text() -> str:
    """Return everything that the model is trained on, as one string (for its digest)."""
    return joined([*training_documents(), *training_pages()])


def digest(text: str) -> str:
    """Return the sha256 of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Write the calibration and evaluation texts and report their digests."""
    parser = argparse.ArgumentParser(description="Write the demo model's texts to a folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for part, text in (("calibration", calibration_text()), ("evaluation", evaluation_text())):
        path = out / f"{part}.txt"
        path.write_bytes(text.encode())
        sys.stdout.write(f"{digest(text)}  {path}\n")


if __name__ == "__main__":
    main()
