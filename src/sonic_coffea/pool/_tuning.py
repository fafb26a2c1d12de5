"""The numbers behind the core's decisions, and the reason for each; `Settings` has the options."""

from __future__ import annotations

from sonic_coffea.transport import PROMPT_S

# Losses and back-offs

# Back-offs double from the first to the last.
FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 0.1, 2.0
# The retry budget. Behind a balancer, some servers may be dead and others healthy. If three of four
# requests are lost, as with Envoy's LEAST_REQUEST and one of two servers dead, 32 losses in a row
# happen once in 10,000 cases. Each response adds ten losses to the budget, so requests are retried
# at once while at least one of eleven is answered.
MAX_LOSSES = 32.0
LOSSES_PER_ANSWER = 10.0
# Tries without a back-off. Rows that are lost more often, while others are answered, may kill the
# servers or make them hang. If every second server is dead or hangs, one request of 16 is lost four
# times by chance. The same number of losses opens a half-open circuit again. It also bounds splits:
# smaller parts of a request that is too large back off, and a request that a route cuts is split at
# most three times while others are in flight beside it. And it is the number of probes: if every
# second server hangs, one of them is answered in 15 of 16 cases.
MAX_RETRIES = 4
# An endpoint that owes responses is probed after this time without any. If nothing but losses came
# for this time, the circuit opens, however few they are; if no server was ever reached, it is not
# one that restarts, and the call fails.
SILENCE_S = PROMPT_S
# After this time, what may have changed is tried again: a server that had another model may have
# loaded the one that is meant, a server that refused large requests may have more memory, and the
# baseline RTT may have grown. And what goes on is logged again.
RECHECK_S = 30.0

# Late responses

# A response is not late before this time. Each hedge that is answered first halves it, down to the
# time for which a thread may wait for a CPU core; each response that comes late doubles it again. A
# connection on which all requests are late for this time may lead to a server that hangs. Once one
# server has described a model, a call waits no longer than this for the others.
LATE_S, MIN_LATE_S = 1.0, 0.05
# A response is late after the mean RTT and four mean deviations, as in TCP (RFC 6298).
DEVIATIONS = 4.0
# The same where no request was ever answered: the server may have to load the model and warm it up,
# and the network may be as slow as this.
UNKNOWN_S, UNKNOWN_BYTES_PER_S = 10.0, 10e6

# Connections

# When connections are renewed after a loss: a pod restarts within ten seconds to some minutes.
FIRST_RENEWAL_S, LAST_RENEWAL_S = 15.0, 240.0
# Envoy counts resets of young streams. If half of a connection's streams end so, and at least 250,
# it suspects an attack and closes the connection (CVE-2023-44487). So at most a third of them are
# reset young, and the others when they are as old as `SILENCE_S`.
MAX_RESETS, RESETS_PER_ANSWER = 50.0, 0.5
# TCP carries no more in a round trip than the buffers of both ends hold, 4 MB by Linux's default:
# 3 Gbit/s at 10 ms. Over such a distance, a request gets a connection of its own, up to four in
# all, if each of the others carries a megabyte.
FAR_S, FULL_BYTES, MAX_CHANNELS = 0.01, 1_000_000, 4

# The adaptive limit

# The mean RTT over the baseline RTT. At this ratio a server is busy: it computes one batch, the
# next one waits, and another is on its way.
MAX_RTT_RATIO = 3.0
# High RTTs never shrink the limit below this number of requests, which keeps any server busy; only
# refusals do. If the server joins small requests to batches, the number is two full batches.
MIN_IN_FLIGHT = 4.0
MIN_BATCHES, MAX_FULL = 2, 64.0
# Weight of the last RTT in the mean.
SMOOTHING = 0.2
# After a refusal, the limit stays at the number that was not refused for 16 round trips, then grows
# again. After each further refusal it stays for twice as many, up to 512. With a limit of 4, one
# request of 100 is refused at first, and one of 2,000 in the end.
HOLD_RTTS, MAX_HOLD_RTTS = 16.0, 512.0
# The baseline RTT is measured anew by a single request, at most once in `RECHECK_S` or 100 RTTs.
PROBE_RTTS = 100
# If the RTT has grown since the last probe, the baseline may have grown, or other clients have more
# requests in the queue. A new baseline grows at most by these factors, so that clients do not
# outbid each other without end.
MAX_GROWTH = 1.25
MAX_TOTAL_GROWTH = 4.0

# Models

# The endpoint lacks a model after this number of requests in a row that did not find the model. If
# one of four servers behind it has the model, 16 requests find this server in 99 % of the cases.
MAX_MISSES = 16
# Losses have an endpoint's models validated again at most once in this time. A balancer that does
# not know yet which server is dead may lead each second request there, and the endpoint would only
# be validated.
VALID_S = SILENCE_S
# If nothing was answered for this time, a server may have been restarted with other models.
QUIET_S = LATE_S
