-- enqueue(id, payload, stream) -> {status, state, depth}
--
-- status: 'ok' (pushed), 'duplicate' (the same body was accepted under this id before), 'conflict' (another body was).
-- The payload waits in the list alone; the request holds its hash.
local id, payload, stream = ARGV[1], ARGV[2], ARGV[3]

local function depth() return redis.call('LLEN', REQUESTS) + redis.call('LLEN', RESUME) end

local sha1 = redis.sha1hex(payload)
local known = read(id, 'state', 'sha1')
if known.state then
  return { known.sha1 == sha1 and 'duplicate' or 'conflict', known.state, depth() }
end

redis.call('HSET', request_key(id), 'state', 'waiting', 'enqueued', integer(now), 'sha1', sha1)
if stream == '1' then redis.call('HSET', request_key(id), 'stream', '1') end
redis.call('RPUSH', REQUESTS, payload)
write_layout()
count('enqueued')
return { 'ok', 'waiting', depth() }
