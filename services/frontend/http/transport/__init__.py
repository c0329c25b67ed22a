"""HTTP/1, independent of the protocols that use it: sockets, connections within limits, the bodies
of requests, and streams of events.

server, server_state, acceptor     the server, the state of the server, and accepting connections
unix_socket                        Unix sockets and the files of the sockets
connection, request_parser         one connection: reads and parses requests, within limits
incoming_request                   counts the received part of a request
request_queue, request_cycle       the requests of a connection; uvicorn runs the app for each
request_body, json_structure       a body while it is received, within limits
event_stream, event_output         a stream of server-sent events
gathering_transport, chunk_writer  joins small writes, and writes chunks
unread_output                      limits output that a client does not read
"""
