-- cancel(id, ttl) -> 'cancelled', 'signalled', 'remembered', or the state of a finished request
--
-- A waiting request ends at once, a running one when its worker hears of it (renew). An unknown id is remembered for as
-- long as a reply is kept: a bare push that nobody has opened yet, or an enqueue that is under way, then ends as cancelled.
pass_maxmemory()
local id, ttl = ARGV[1], tonumber(ARGV[2])

local request = read_whole(id)
if request.state == 'waiting' then
  end_waiting(id, request, 'cancelled', ttl)
  return 'cancelled'
end
if request.state and request.state ~= 'running' then return request.state end
redis.call('HSET', request_key(id), 'cancelled', integer(ttl))
if request.state then return 'signalled' end
redis.call('PEXPIRE', request_key(id), integer(ttl))
write_layout()
return 'remembered'
