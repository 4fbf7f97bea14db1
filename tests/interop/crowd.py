"""A crowd of clients of one source that never send a whole ClientHello.

    crowd.py ADDRESS PORT SOURCE COUNT silent|drip SECONDS

`silent` clients send nothing, `drip` clients one byte of a hello a second. Prints `connected` once all have connected, and,
when the gateway has closed all of them or the seconds are over, one line of JSON: how many were closed by a FIN, after an
alert, or by a reset, how many are still open, and how long the shortest and the longest was open.
"""

import errno
import json
import resource
import select
import socket
import sys
import time


def hello(name):
    entry = b"\0" + len(name).to_bytes(2, "big") + name
    names = len(entry).to_bytes(2, "big") + entry
    extensions = b"\0\0" + len(names).to_bytes(2, "big") + names + b"\0\x2b\0\3\2\3\4"
    body = b"\3\3" + b"\7" * 32 + b"\0" + b"\0\4\x13\1\x13\2" + b"\1\0"
    body += len(extensions).to_bytes(2, "big") + extensions
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


def main():
    address, port, source, count, kind, seconds = sys.argv[1:]
    count, deadline = int(count), time.monotonic() + float(seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 50:
        print(json.dumps({"skipped": f"the limit of descriptors is {hard}"}), flush=True)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    poll = select.epoll()
    clients, opened = {}, {}
    waiting = set()
    ends = {"fin": 0, "alert": 0, "reset": 0}
    lasted = []
    drops = hello(b"a.test")
    sent, next_turn = {}, time.monotonic()
    begun = 0
    told = False

    def end(number, how):
        ends[how] += 1
        lasted.append(time.monotonic() - opened[number])
        poll.unregister(number)
        clients.pop(number).close()
        waiting.discard(number)

    while time.monotonic() < deadline and (begun < count or clients):
        # A few at a time: the queue of the listener is short, and a lost SYN waits for a second.
        while begun < count and len(waiting) < 200:
            client = socket.socket()
            client.setblocking(False)
            client.bind((source, 0))
            number = client.fileno()
            clients[number], opened[number], sent[number] = client, time.monotonic(), 0
            code = client.connect_ex((address, int(port)))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "connect")
            waiting.add(number)
            poll.register(number, select.EPOLLIN | select.EPOLLOUT)
            begun += 1
        for number, events in poll.poll(0.02):
            if number in waiting and events & select.EPOLLOUT and not events & select.EPOLLERR:
                waiting.discard(number)
                opened[number] = time.monotonic()
                poll.modify(number, select.EPOLLIN)
            if events & (select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP):
                try:
                    read = clients[number].recv(64)
                    end(number, "alert" if read else "fin")
                except BlockingIOError:
                    pass
                except OSError:
                    end(number, "reset")
        if begun == count and not waiting and not told:
            print("connected", flush=True)
            told = True
        if kind == "drip" and time.monotonic() >= next_turn:
            next_turn = time.monotonic() + 1
            for number in [number for number in clients if number not in waiting]:
                at = sent[number]
                sent[number] += 1
                try:
                    # The last byte is never sent.
                    if at < len(drops) - 1:
                        clients[number].send(drops[at:at + 1])
                except OSError:
                    # Its end is read at the next turn.
                    pass
    lasted.sort()
    print(json.dumps({
        **ends,
        "open": len(clients),
        "shortest": lasted[0] if lasted else None,
        "longest": lasted[-1] if lasted else None,
    }), flush=True)


main()
