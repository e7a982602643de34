"""HTTP/1.1 to engines: the second hop of every request, and no more of HTTP than that hop needs.

    pool = Pool(Origin.of("http://10.0.0.5:8000"), connect_timeout_s=2, keepalive_s=4)
    response = await pool.send(head, body, deadline)       # its status and headers are in hand
    while data := await response.read(deadline):
        ...
    response.close()                                       # at once, wherever it stands; free where it is complete

`request.py` writes heads, `connection.py` is one socket and its parser, `response.py` one answer and who reads it,
`inflate.py` what came compressed, `pool.py` the connections to one address, `alarm.py` their deadlines, and `errors.py`
what may go wrong. A general client spends more on one request than all the rest of the gateway: docs/lab-log.md has the
figures.

There are no redirects (a key is for one engine alone), cookies, proxies or pipelining, and nothing is read that was not
asked for.
"""
