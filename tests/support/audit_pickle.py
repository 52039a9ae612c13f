"""Records in every Python process of a worker group whether it unpickles an object that names a class or function.

`install` writes a sitecustomize.py that adds an audit hook for `pickle.find_class`, the event of every unpickled name:
an exploit needs one. Processes find it through PYTHONPATH, forked ones inherit it.
"""

import os

SITECUSTOMIZE = """
import os, sys, traceback

FOLDER = {folder!r}


def note(text):
    with open(os.path.join(FOLDER, str(os.getpid())), "a") as file:
        file.write(text + "\\n")


def hook(event, arguments):
    if event == "pickle.find_class":
        note("".join([f"{{event}} {{arguments}} in {{sys.argv}}\\n", *traceback.format_stack()[-8:-1]]))


note("installed")
os.register_at_fork(after_in_child=lambda: note("installed"))
sys.addaudithook(hook)
"""


def install(code_folder, events_folder):
    """Write the hook into code_folder, for PYTHONPATH; each process then writes a file into events_folder."""
    code_folder.mkdir()
    events_folder.mkdir()
    (code_folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(folder=str(events_folder)))
    return os.pathsep.join(filter(None, (str(code_folder), os.environ.get("PYTHONPATH"))))


def audited(events_folder):
    """{process id: what it recorded beyond the hook's installation} of the processes that had the hook."""
    return {int(file.name): file.read_text().replace("installed\n", "") for file in events_folder.iterdir()}
