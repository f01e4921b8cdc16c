"""Start the ranks of one or many machines, supervise them, and shut them down together. No torch at import.

plan                 what each machine starts         supervisor       the launcher of one machine
store                keys, and signed messages        ranks            its rank processes
tcp_store            the store that machine 0 serves  stall_detection  which of them hang
rendezvous           registration and comparison      heartbeat        whether other machines are alive
node_info            what is compared                 termination      why a run ends early
launcher_connection  a rank's side: heartbeats to its launcher
"""
