"""HTTP/1 itself, independent of the protocols above it: sockets, connections within limits, the
bodies of requests, and streams of events.

server, server_state, acceptor     the server, what its connections share, how they are accepted
unix_socket                        Unix sockets and their files
connection, request_parser         one connection: what its client sends, within limits
incoming_request                   how much of a request has come
request_queue, request_cycle       the requests of a connection; uvicorn runs the app for each
request_body, json_structure       a body while it arrives, within its limits
event_stream, event_output         a stream of server-sent events
gathering_transport, chunk_writer  what is written, gathered into few writes
unread_output                      output that a client does not read
"""
