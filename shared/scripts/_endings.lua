-- How requests end or go back: the second part of what all scripts share.
local DEAD_LETTERS_KEPT = 1000
local RUBBISH_KEPT = 65536 -- bytes of what was never a request
local HASH_OUTLIVES_REPLY = 60000 -- so that a late reader learns "expired" instead of "never heard of it"
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
    'kept_until', 'cancelled', 'crashes', 'crashes_alone', 'alone', 'payload', 'enqueued', 'claimed')
end

-- The only way to become finished: one reply, tokens ended or removed, the request cut down to what a repeat needs.
-- `request` holds its fence, sha1, stream, due and kept_until. Deleting first shrinks the hash for good, and clears
-- whatever is in the way.
local function finish(id, request, reason, body, ttl)
  ttl = math.max(ttl, tonumber(request.kept_until or 0) - now)
  if request.due then redis.call('ZREM', DEADLINES, id) end
  redis.call('DEL', reply_key(id), request_key(id))
  redis.call('RPUSH', reply_key(id), body)
  redis.call('PEXPIRE', reply_key(id), integer(ttl))
  redis.call('HSET', request_key(id), 'state', reason, 'fence', request.fence or '0', 'sha1', request.sha1 or '')
  redis.call('PEXPIRE', request_key(id), integer(ttl + HASH_OUTLIVES_REPLY))
  if request.stream then
    redis.call('XADD', tokens_key(id), '*', 'end', reason)
    redis.call('PEXPIRE', tokens_key(id), integer(ttl))
  else
    redis.call('DEL', tokens_key(id))
  end
  count('finished_' .. reason)
end

-- The output tokens so far: their ids, and their text.
local function saved_output(id)
  local ids, texts = {}, {}
  for _, entry in ipairs(redis.call('XRANGE', tokens_key(id), '-', '+')) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'ids' then ids[#ids + 1] = fields[i + 1] end
      if fields[i] == 'text' then texts[#texts + 1] = fields[i + 1] end
    end
  end
  return table.concat(ids, ','), table.concat(texts)
end

-- End a request that no worker will end, with the output of its last checkpoint; `problem` goes with reason 'error'.
local function end_early(id, request, reason, ttl, problem)
  local ids, text = '', ''
  if request.tokens then ids, text = saved_output(id) end
  local body = cjson.encode({
    id = id,
    finish_reason = reason,
    text = text,
    usage = { prompt_tokens = 0, output_tokens = tonumber(request.tokens or 0) },
    error = problem,
    queue_ms = request.enqueued and (request.claimed or now) - request.enqueued,
    e2e_ms = request.enqueued and now - request.enqueued,
    deliveries = tonumber(request.deliveries or 0),
  })
  -- A prompt of token ids is answered with token ids. cjson would write an empty array as an object.
  if request.payload and string.find(request.payload, '"prompt"%s*:%s*%[') then
    body = string.sub(body, 1, -2) .. ',"token_ids":[' .. ids .. ']}'
  end
  request.fence = nil -- what a worker still says of it comes too late
  finish(id, request, reason, body, ttl)
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

local function overdue(request) return tonumber(request.due or math.huge) <= now end

-- Why a request must not run any longer, or nil.
local function called_off(request)
  if request.cancelled then return 'cancelled' end
  if overdue(request) then return 'deadline' end
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
