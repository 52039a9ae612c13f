"""Windows: access control lists that exclude other users of the machine, as mode 0700 does on POSIX systems.

Administrators and the system have access to all files anyway, and are named in the lists as Python's os.mkdir does.
"""

import ctypes
import os
import sys
from contextlib import contextmanager
from ctypes import wintypes

assert sys.platform == "win32"             # for mypy

TOKEN_QUERY, TOKEN_USER, TOKEN_OWNER = 8, 1, 4                 # winnt.h
SE_FILE_OBJECT, OWNER, DACL, PROTECTED_DACL = 1, 1, 4, 0x80000000                      # accctrl.h, winnt.h
SDDL_REVISION_1 = 1
# protected from the parent's list; full access, inherited by files and folders inside
FOLDER_LIST = "D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;BA)(A;OICI;FA;;;{})"
OBJECT_LIST = "D:P(A;;GA;;;SY)(A;;GA;;;{})"


class SecurityAttributes(ctypes.Structure):
    """SECURITY_ATTRIBUTES"""
    _fields_ = [("length", wintypes.DWORD), ("descriptor", ctypes.c_void_p), ("inherit", wintypes.BOOL)]


def kernel32():
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    library.GetCurrentProcess.restype = wintypes.HANDLE
    library.CloseHandle.argtypes = (wintypes.HANDLE,)
    library.LocalFree.argtypes = (ctypes.c_void_p,)
    library.CreateDirectoryW.argtypes = wintypes.LPCWSTR, ctypes.POINTER(SecurityAttributes)
    return library


def advapi32():
    library = ctypes.WinDLL("advapi32", use_last_error=True)
    library.OpenProcessToken.argtypes = wintypes.HANDLE, wintypes.DWORD, ctypes.POINTER(wintypes.HANDLE)
    library.GetTokenInformation.argtypes = (wintypes.HANDLE, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD,
                                            ctypes.POINTER(wintypes.DWORD))
    library.ConvertSidToStringSidW.argtypes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    library.ConvertStringSecurityDescriptorToSecurityDescriptorW.argtypes = (
        wintypes.LPCWSTR, wintypes.DWORD, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    library.ConvertSecurityDescriptorToStringSecurityDescriptorW.argtypes = (
        ctypes.c_void_p, wintypes.DWORD, wintypes.DWORD, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    library.GetSecurityDescriptorDacl.argtypes = (ctypes.c_void_p, ctypes.POINTER(wintypes.BOOL),
                                                  ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(wintypes.BOOL))
    library.GetNamedSecurityInfoW.argtypes = (
        wintypes.LPCWSTR, ctypes.c_int, wintypes.DWORD, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    library.SetNamedSecurityInfoW.argtypes = (wintypes.LPCWSTR, ctypes.c_int, wintypes.DWORD, ctypes.c_void_p,
                                              ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library


def check(result):
    """Raise OSError if a function returned 0; returns the result."""
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())
    return result


def user_sid(kind=TOKEN_USER):
    """This user's security identifier, "S-1-5-21-..."; kind TOKEN_OWNER: of the owner of what this process creates,
    which is a group for some administrators."""
    token = wintypes.HANDLE()
    library = advapi32()
    check(library.OpenProcessToken(kernel32().GetCurrentProcess(), TOKEN_QUERY, ctypes.byref(token)))
    try:
        memory, num_bytes = ctypes.create_string_buffer(1024), wintypes.DWORD()
        check(library.GetTokenInformation(token, kind, memory, len(memory), ctypes.byref(num_bytes)))
        # TOKEN_USER and TOKEN_OWNER begin with a pointer to the identifier
        return _sid_text(ctypes.c_void_p.from_buffer(memory))
    finally:
        kernel32().CloseHandle(token)


@contextmanager
def attributes(template):
    """SecurityAttributes from a list in the security descriptor definition language; {} stands for this user."""
    descriptor = ctypes.c_void_p()
    check(advapi32().ConvertStringSecurityDescriptorToSecurityDescriptorW(
        template.format(user_sid()), SDDL_REVISION_1, ctypes.byref(descriptor), None))
    try:
        yield SecurityAttributes(ctypes.sizeof(SecurityAttributes), descriptor, False)
    finally:
        kernel32().LocalFree(descriptor)


def make_folder(path):
    """Create a folder with FOLDER_LIST. Raises OSError."""
    with attributes(FOLDER_LIST) as security:
        check(kernel32().CreateDirectoryW(os.path.abspath(path), ctypes.byref(security)))


def restrict_folder(path):
    """Replace the list of an existing folder by FOLDER_LIST. Raises OSError."""
    library, present, default, dacl = advapi32(), wintypes.BOOL(), wintypes.BOOL(), ctypes.c_void_p()
    with attributes(FOLDER_LIST) as security:
        check(library.GetSecurityDescriptorDacl(security.descriptor, ctypes.byref(present), ctypes.byref(dacl),
                                                ctypes.byref(default)))
        error = library.SetNamedSecurityInfoW(str(path), SE_FILE_OBJECT, DACL | PROTECTED_DACL, None, None, dacl, None)
    if error:
        raise ctypes.WinError(error)


def owner_and_list(path):
    """(owner's security identifier, access control list in the definition language) of a file. Raises OSError."""
    library, owner, dacl, descriptor, text = advapi32(), *(ctypes.c_void_p() for _ in range(4))
    error = library.GetNamedSecurityInfoW(str(path), SE_FILE_OBJECT, OWNER | DACL, ctypes.byref(owner), None,
                                          ctypes.byref(dacl), None, ctypes.byref(descriptor))
    if error:
        raise ctypes.WinError(error)
    try:
        check(library.ConvertSecurityDescriptorToStringSecurityDescriptorW(descriptor, SDDL_REVISION_1, DACL,
                                                                           ctypes.byref(text), None))
        return _sid_text(owner), _taken(text)
    finally:
        kernel32().LocalFree(descriptor)


def is_owned(path):
    """Whether this user, or the group that owns what this user creates, owns a file. Raises OSError."""
    return owner_and_list(path)[0] in (user_sid(), user_sid(TOKEN_OWNER))


def _sid_text(sid):
    text = ctypes.c_void_p()
    check(advapi32().ConvertSidToStringSidW(sid, ctypes.byref(text)))
    return _taken(text)


def _taken(text):
    """The string that Windows has allocated, which is freed."""
    try:
        return ctypes.wstring_at(text.value)
    finally:
        kernel32().LocalFree(text)
