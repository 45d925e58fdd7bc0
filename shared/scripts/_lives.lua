-- How requests begin and end; stands on `_prelude.lua`.
local REPLIES_KEPT, REPLIES_KEPT_MS = 10000, 60000 -- of one name: whoever misses some finds them by their ids
local HASH_OUTLIVES_REPLY = 60000 -- so that a late reader learns "expired" instead of "never heard of it"

-- What a request has from its beginning on; `timeout` in milliseconds or nil.
local function begin(id, request, timeout)
  request.state, request.enqueued = 'waiting', integer(now)
  if timeout then
    request.due = integer(now + timeout)
    redis.call('ZADD', DEADLINES, request.due, id)
  end
end

-- Names and values of a hash in one list, as HSET takes them.
local function flat(fields)
  local list = {}
  for name, value in pairs(fields) do
    list[#list + 1] = name
    list[#list + 1] = value
  end
  return list
end

-- Tell whoever waits for many requests over one connection.
local function announce(id, name)
  local replies = PREFIX .. 'replies:' .. name
  redis.call('XADD', replies, 'MAXLEN', '~', REPLIES_KEPT, '*', 'id', id)
  redis.call('PEXPIRE', replies, REPLIES_KEPT_MS)
end

-- The only way to become finished: one reply, tokens ended or removed, the request cut down to what a repeat needs.
-- `request` holds its fence, sha1, stream, due, kept_until and reply_to. Deleting first shrinks the hash for good, and clears
-- whatever is in the way.
local function finish(id, request, reason, body, ttl)
  ttl = math.max(ttl, tonumber(request.kept_until or 0) - now)
  if request.due then redis.call('ZREM', DEADLINES, id) end
  local gone = { reply_key(id), request_key(id), not request.stream and tokens_key(id) or nil }
  redis.call('DEL', unpack(gone))
  redis.call('RPUSH', reply_key(id), body)
  redis.call('PEXPIRE', reply_key(id), integer(ttl))
  redis.call('HSET', request_key(id), 'state', reason, 'fence', request.fence or '0', 'sha1', request.sha1 or '')
  redis.call('PEXPIRE', request_key(id), integer(ttl + HASH_OUTLIVES_REPLY))
  if request.stream then
    redis.call('XADD', tokens_key(id), '*', 'end', reason)
    redis.call('PEXPIRE', tokens_key(id), integer(ttl))
  end
  if request.reply_to then announce(id, request.reply_to) end
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
