-- enqueue(id, payload, stream, priority, timeout, cost, reply_to, key, key_sha1, key_ttl)
--   -> {status, state, depth, id, queued_tokens, retry_after}
--
-- status: 'ok' (accepted), 'duplicate' (the same body was accepted before under this id or idempotency key), 'conflict'
-- (another body was), 'full' (try again after so many ms). `id` is the request that the answer is about: under a known key
-- the first one's. The payload waits in the list alone; the request holds its hash.
local id, payload, stream, priority, timeout = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local cost, reply_to, key, key_sha1, key_ttl = tonumber(ARGV[6]), ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10])
local list = assert(LISTS[priority], 'no such priority')
local RETRY_AFTER = 1000
local CANCEL_OVERTAKES = 60000 -- a cancel that is older has not overtaken this call: it was meant for an earlier life of the id

local waiting, queued_tokens = depth(), tonumber(meta.queued_tokens or 0)

local function answer(status, state, about)
  return { status, state, waiting, about or id, queued_tokens, status == 'full' and RETRY_AFTER or 0 }
end

-- After somebody has deleted the lists the counters of new requests are wrong. They are put right further down: at maxmemory
-- the first write decides whether the script may go on, so it must be one that needs memory.
local counters_lie = (meta.queued_tokens or meta.husks) and redis.call('EXISTS', HIGH, REQUESTS, LOW) == 0
if counters_lie then waiting, queued_tokens = waiting + tonumber(meta.husks or 0), 0 end

local function is_full()
  local max_depth, max_tokens = tonumber(meta.max_depth or 0), tonumber(meta.max_queued_tokens or 0)
  if max_depth > 0 and waiting >= max_depth then return true end
  -- One that is larger than the limit itself passes when nothing else is queued.
  return max_tokens > 0 and queued_tokens > 0 and queued_tokens + cost > max_tokens
end

if key ~= '' then
  local sha1, first = string.match(redis.call('GET', idempotency_key(key)) or '', '^(%S+) (%S+)$')
  if first then
    return answer(sha1 == key_sha1 and 'duplicate' or 'conflict', read(first, 'state').state or 'forgotten', first)
  end
end

local sha1 = redis.sha1hex(payload)
local known = read(id, 'state', 'sha1', 'cancelled')
if known.state then return answer(known.sha1 == sha1 and 'duplicate' or 'conflict', known.state) end
if is_full() then
  count('full')
  return answer('full', '')
end

local request = { sha1 = sha1, stream = stream == '1' and stream or nil, reply_to = reply_to ~= '' and reply_to or nil }
if key ~= '' then
  redis.call('SET', idempotency_key(key), key_sha1 .. ' ' .. id, 'PX', key_ttl)
  request.kept_until = integer(now + key_ttl)
end
count('enqueued')
local overtaken = known.cancelled and known.cancelled - redis.call('PTTL', request_key(id)) < CANCEL_OVERTAKES
if overtaken then
  end_early(id, request, 'cancelled', tonumber(known.cancelled))
else
  if cost > 0 then request.cost = integer(cost) end
  begin(id, request, timeout > 0 and timeout or nil)
  redis.call('HSET', request_key(id), unpack(flat(request)))
  if known.cancelled then
    redis.call('HDEL', request_key(id), 'cancelled')
    redis.call('PERSIST', request_key(id))
  end
  if priority ~= 'normal' then poke() end
  redis.call('RPUSH', list, payload)
  waiting = waiting + 1
end
if counters_lie then redis.call('HDEL', META, 'queued_tokens', 'husks') end
if request.cost then queued_tokens = redis.call('HINCRBY', META, 'queued_tokens', request.cost) end
write_layout()
return answer('ok', overtaken and 'cancelled' or 'waiting')
