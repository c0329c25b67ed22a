"""HTTP/1 itself, which knows no protocol above it: sockets, connections within limits, the bodies
of requests, and streams of events.

server, acceptor, unix_socket      sockets, and the connections that are accepted from them
connection, incoming_request       one connection: a guard in front of uvicorn's parser
request_body, json_structure       a body while it arrives, within its limits
event_stream, event_output         a stream of server-sent events
gathering_transport, chunk_writer  what is written, gathered into few writes
unread_output                      what a client does not read
"""
