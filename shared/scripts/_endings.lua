-- How requests that no worker ends come to their end, or go back; stands on `_lives.lua`.
local DEAD_LETTERS_KEPT = 1000
local RUBBISH_KEPT = 65536 -- bytes of what was never a request
local HUSK_KEPT = 7 * 86400000

-- `payload` is kept whole where it can be sent again; `size` tells whether it was.
local function dead_letter(why, id, payload, size)
  redis.call('XADD', DEAD, 'MAXLEN', DEAD_LETTERS_KEPT, '*', 'why', why, 'id', id, 'payload', payload, 'size', size)
  count('dead_letters')
end

local function rubbish(why, id, payload) dead_letter(why, id, string.sub(payload, 1, RUBBISH_KEPT), #payload) end

-- All that ending a request takes to know.
local function read_whole(id)
  return read(id, 'state', 'fence', 'worker', 'sha1', 'stream', 'deliveries', 'tokens', 'claimed_tokens', 'due', 'cost',
    'kept_until', 'cancelled', 'crashes', 'crashes_alone', 'alone', 'payload', 'enqueued', 'claimed', 'reply_to')
end

-- End a request that cannot be served: a dead letter for the operator, an error reply for whoever waits.
local function refuse(id, request, payload, why, code, ttl)
  rubbish(why, id, payload)
  end_early(id, request, 'error', ttl, { code = code, message = why })
end

-- A request leaves the lists of new ones: its tokens no longer count as queued.
local function dequeue(request)
  if request.cost then redis.call('HINCRBY', META, 'queued_tokens', '-' .. request.cost) end
end

-- End a waiting request. A new one's push stays where it is, since nobody can take it out of the middle of a list: it is a
-- husk, and the request remembers it for as long, or the push would begin a second life after the first is forgotten.
local function end_waiting(id, request, reason, ttl)
  end_early(id, request, reason, ttl)
  if request.deliveries then
    redis.call('LREM', RESUME, 1, id)
    redis.call('LREM', SUSPECTS, 1, id)
  else
    dequeue(request)
    local left = redis.call('PTTL', request_key(id))
    redis.call('HSET', request_key(id), 'husk', integer(now + left))
    redis.call('PEXPIRE', request_key(id), integer(math.max(left, HUSK_KEPT)))
    redis.call('HINCRBY', META, 'husks', 1)
  end
end

-- Take a running request from its worker. The next claim goes on from its checkpoint, and the old fence opens nothing any
-- more; one that is cancelled or overdue ends here.
local function give_back(id, request, ttl)
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', own_key(request.worker), id)
  local reason = called_off(request)
  if reason then return end_early(id, request, reason, ttl) end
  redis.call('HSET', request_key(id), 'state', 'waiting', 'fence', '0')
  redis.call('HDEL', request_key(id), 'alone')
  redis.call('RPUSH', tonumber(request.crashes or 0) >= CRASHES_BEFORE_SUSPECT and SUSPECTS or RESUME, id)
  poke()
end
