"""Slow strangers: they finish the TLS handshake with a host that listens, send a byte now and then, and come back
when they are turned away.

    python -m tests.support.strangers ADDRESS PORT INTERVAL_S SOURCE [SOURCE ...]

One connection from each SOURCE, an address of this machine; a line "ready" when all have finished the handshake.
Runs until it is ended.
"""

import socket
import ssl
import sys
import threading
import time


def main():
    address, port, interval_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ready = [threading.Event() for _ in sys.argv[4:]]
    for source, is_ready in zip(sys.argv[4:], ready):
        threading.Thread(target=keep_coming, args=((address, port), source, interval_s, is_ready), daemon=True).start()
    for is_ready in ready:
        is_ready.wait()
    print("ready", flush=True)
    threading.Event().wait()


def keep_coming(target, source, interval_s, is_ready):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while True:
        try:
            with (socket.create_connection(target, 60, (source, 0)) as plain,
                  context.wrap_socket(plain) as secure):
                is_ready.set()
                secure.settimeout(interval_s)
                while True:
                    secure.sendall(b"\0")
                    try:
                        if not secure.recv(1):
                            break
                    except TimeoutError:
                        pass
        except OSError:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
